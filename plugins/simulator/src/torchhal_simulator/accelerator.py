"""Declare the simulated accelerator, without strategy code."""

from __future__ import annotations

from dataclasses import asdict
from typing import ClassVar

import torch

from torchhal.accelerators import Accelerator
from torchhal.capabilities import STANDARD
from torchhal_simulator._counters import counters


class SimAccelerator(Accelerator):
    """A simulated accelerator: torch device ``sim``, several per machine, collectives over gloo.

    It computes nothing faster than the CPU, so ``accelerator="auto"`` never takes it.
    """

    name: ClassVar[str] = "sim"
    device_type: ClassVar[str] = "sim"
    backend: ClassVar[str] = "sim"
    capabilities: ClassVar[frozenset[str]] = STANDARD
    auto_priority: ClassVar[int | None] = None
    features: ClassVar[frozenset[str]] = frozenset({"memory_stats", "threads"})

    @classmethod
    def load(cls) -> None:
        from torchhal_simulator._library import load

        load()

    def device_stats(self, device: torch.device) -> dict[str, float]:
        """Return ``memory_used_percent`` of the device's limit, and what :func:`.counters` counts of all devices.

        Their names are ``operators_total``, ``h2d_total``, ``d2h_total``, ``d2d_total`` and ``synchronizations_total``.
        """
        try:
            limit = self._module().get_device_properties(device).total_memory
            used = self.memory_stats(device)["allocated"]
            counts = asdict(counters("sim"))
        except (ImportError, RuntimeError):  # the device can't be built here
            return {}
        share = {"memory_used_percent": 100.0 * used / limit} if limit else {}
        return {**super().device_stats(device), **share, **{f"{key}_total": float(n) for key, n in counts.items()}}
