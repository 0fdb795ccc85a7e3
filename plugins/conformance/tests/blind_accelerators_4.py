"""Accelerators that differ from core's CPU in one defect each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from zoo import caught_by

from torchhal.accelerators import CPUAccelerator
from torchhal.plugin import Availability
from torchhal.pytree import map_tensors, moves_itself


class _KeptLoader:
    """A loader whose batches of the first complete epoch are kept."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._kept: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            return iter(list(self._kept))
        return self._first_epoch(iter(self._loader))

    def _first_epoch(self, batches: Iterator[Any]) -> Iterator[Any]:
        kept = []
        for batch in batches:
            kept.append(batch)
            yield batch
        self._kept = kept

    def __len__(self) -> int:
        return len(self._loader)


@caught_by("ACC-53")
class ReplayedEpochAccelerator(CPUAccelerator):
    """Its loader keeps the batches of the first epoch and gives the same ones in each later epoch."""

    # "It gives the batches of `loader`, all of them in their order, with their tensors on any device, each time it is
    # iterated".
    # From the second epoch on nothing is shuffled and nothing is augmented anew: the model is trained on the same few
    # thousand batches in one order, and overfits without a message.

    name: ClassVar[str] = "replayed_epoch"
    auto_priority: ClassVar[int | None] = None

    def process_dataloader(self, loader: Any, device: torch.device) -> Iterable[Any]:
        return _KeptLoader(loader)


@caught_by("ACC-50")
class StagingBufferAccelerator(CPUAccelerator):
    """It moves batches into staging buffers that the next batch of the same shape overwrites."""

    # "The same structure; the tensors' values, dtypes and shapes are unchanged."
    # A step that returns a part of its batch (the targets beside the predictions), or a callback that keeps one, finds
    # the last batch's values in all of them: the metrics of the whole epoch compare with one batch's targets.

    name: ClassVar[str] = "staging_buffer"
    auto_priority: ClassVar[int | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        place = 0

        def staged(leaf: Any) -> Any:
            nonlocal place
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.requires_grad:
                return leaf
            place += 1
            key = (place, leaf.shape, leaf.dtype)
            if key not in self._buffers:
                self._buffers[key] = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            return self._buffers[key].copy_(leaf)

        moved = super().batch_to_device(batch, device, non_blocking=non_blocking)
        return map_tensors(moved, staged, is_leaf=moves_itself)

    def teardown(self) -> None:
        self._buffers.clear()
        super().teardown()


@caught_by("ACC-31")
class FlushedDenormalsAccelerator(CPUAccelerator):
    """Its set-up switches denormal numbers off for the whole process and leaves them off."""

    # "torch's defaults and switches, and the CPU's random state, are left unchanged here as in `setup` and `teardown`."
    # After one fit every number below 1e-38 (float32) or 1e-308 (float64) is zero in the rest of the program:
    # log-likelihoods and tails of distributions that were right before are zero or minus infinity.

    name: ClassVar[str] = "flushed_denormals"
    auto_priority: ClassVar[int | None] = None

    def setup(self, trainer: Any = None) -> None:
        super().setup(trainer)
        torch.set_flush_denormal(True)  # denormal operands cost a hundred cycles each


class _StackedRegion:
    """A region that ends the one which was begun last."""

    def __init__(self, name: str, running: list[Any]) -> None:
        self._name = name
        self._running = running

    def __enter__(self) -> Any:
        region = torch.profiler.record_function(self._name)
        region.__enter__()
        self._running.append(region)
        return region

    def __exit__(self, *error: Any) -> None:
        self._running.pop().__exit__(*error)


@caught_by("ACC-57")
class SharedRegionStackAccelerator(CPUAccelerator):
    """Its profiler regions are on one stack for all threads, so a thread ends the region of another one."""

    # "Called on any rank and thread, while nothing is profiled too; regions nest."
    # As soon as a loader's or a logger's thread opens a region too, regions end at the wrong time and in the wrong
    # thread: the trace blames "forward" for what a thread beside it did.

    name: ClassVar[str] = "shared_region_stack"
    auto_priority: ClassVar[int | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._running: list[Any] = []

    def profile_region(self, name: str) -> AbstractContextManager[Any]:
        return _StackedRegion(name, self._running)


@caught_by("ACC-56")
class NarrowedStartMethodsAccelerator(CPUAccelerator):
    """Once a device is set up it removes "fork" from the class's start methods, for good."""

    # "The class attributes are data and never change."
    # What a program may do depends on what it did before: a Trainer with strategy="ddp_fork" that was accepted in the
    # morning is refused after any other fit in the notebook, and in every other object of this class.

    name: ClassVar[str] = "narrowed_start_methods"
    auto_priority: ClassVar[int | None] = None

    def setup_device(self, device: torch.device) -> None:
        super().setup_device(device)
        type(self).start_methods = frozenset({"spawn"})  # the runtime is up now, and a forked child can't use it


@caught_by("ACC-56")
class LeakedProbeHandleAccelerator(CPUAccelerator):
    """Each probe for the hardware opens the driver's control node and never closes it."""

    # "Never raises, starts no device, and may be called any number of times."
    # A service or a sweep that makes Trainers in one process runs out of file descriptors after about a thousand: the
    # hardware is reported as unavailable, and data sets and checkpoints can't be opened either.

    name: ClassVar[str] = "leaked_probe_handle"
    auto_priority: ClassVar[int | None] = None

    @classmethod
    def availability(cls) -> Availability:
        try:
            node = os.open(os.devnull, os.O_RDONLY)  # in place of the driver's /dev/acme0
            os.fstat(node)
        except OSError as error:
            return Availability(False, f"the driver's control node can't be opened: {error}")
        return super().availability()
