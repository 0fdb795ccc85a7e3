"""Tell when the training loader is what a step waits for, and what to change."""

from __future__ import annotations

import os
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

STEPS: Final = 50
"""Batches that are looked at."""
SKIPPED: Final = 2
"""First batches of a fit, which are left out: kernels, caches and workers start in them."""
SHARE: Final = 0.3
"""Share of a step's time spent in waiting for the batch, above which the loader is named."""
SECONDS: Final = 1e-3
"""A shorter wait for a batch is not worth a worker process, whose batches cost about as much to receive."""


class LoaderWait:
    """The time that a fit's first batches have waited for the loader, and that their steps have taken."""

    def __init__(self) -> None:
        self.batches = 0
        self.waited = self.total = self.waited_at_epoch_start = 0.0

    def add(self, waited: float, total: float, *, first: bool) -> bool:
        """Count a batch; return whether it was the last one that is looked at.

        Args:
            waited: seconds until the loader gave it.
            total: seconds since the previous batch was there; equal to ``waited`` for the first one of an epoch.
            first: whether it is the first one of an epoch.
        """
        self.batches += 1
        if self.batches <= SKIPPED:
            return False
        self.waited += waited
        self.total += total
        if first:
            self.waited_at_epoch_start += waited
        return self.batches == SKIPPED + STEPS

    def describe(self, loader: Any, device: torch.device, local_processes: int) -> str | None:
        """Return the sentence that names the loader as the bottleneck; None if it isn't.

        Args:
            loader: the training loader.
            device: that the batches go to.
            local_processes: processes of this node, which share its cores.
        """
        count = self.batches - SKIPPED
        if count <= 0 or self.waited < SHARE * self.total or self.waited < SECONDS * count:
            return None
        starts = self.waited_at_epoch_start > 0.5 * self.waited
        return (
            f"the training loader is the bottleneck: steps have spent {100 * self.waited / self.total:.0f} % of their "
            f"time waiting for a batch ({1e3 * self.waited / count:.1f} ms a batch, over {count} batches"
            f"{', most of it at the start of an epoch' if starts else ''}). {advice(loader, device, local_processes)}"
        )


def advice(loader: Any, device: torch.device, local_processes: int) -> str:
    """Return what to change about ``loader``, a whole sentence."""
    if not isinstance(loader, DataLoader):
        return "Let a torch.utils.data.DataLoader with num_workers make the batches in processes of its own"
    cores = max(1, _cores() // max(1, local_processes))
    changes = []
    if loader.num_workers < cores:
        changes.append(f"num_workers={min(cores, 8) if not loader.num_workers else cores}")
    if not loader.persistent_workers:
        changes.append("persistent_workers=True")
    if device.type != "cpu" and not loader.pin_memory:
        changes.append("pin_memory=True")
    if loader.num_workers and (loader.prefetch_factor or 2) <= 2:
        changes.append("prefetch_factor=4")
    less = "do less in the dataset's __getitem__: prepare the samples once, and store them"
    if not changes:
        return less[0].upper() + less[1:]
    return (
        f"Give its DataLoader {' and '.join([', '.join(changes[:-1]), changes[-1]] if changes[1:] else changes)} "
        f"(it has num_workers={loader.num_workers}, and this process {cores} core(s)), or {less}"
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
