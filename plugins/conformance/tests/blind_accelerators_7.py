"""Accelerators that differ from sound ones in one mistake each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from sound_components import SameCPU
from zoo import caught_by

from torchhal.pytree import map_tensors


@caught_by("ACC-50")
class StagingBuffersAccelerator(SameCPU):
    """Copies each batch into the buffers that hold the batch before it."""

    # Contract, batch_to_device: "The same structure; the tensors' values, dtypes and shapes are unchanged."
    # A batch keeps its values only until the next one is moved: predictions that return a part of their batch, a queue
    # of earlier samples, a loop that moves one batch ahead all hold the last batch's numbers, silently.

    name = "staging_buffers"
    auto_priority = None

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[Any, torch.Tensor] = {}

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def stage(leaf: Any) -> Any:
            plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.requires_grad
            if not plain or leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or leaf.is_meta:
                return leaf
            if id(leaf) not in staged:
                key = (len(staged), leaf.dtype, leaf.shape, leaf.stride(), leaf.device)
                if key not in self._buffers:
                    self._buffers[key] = torch.empty_like(leaf)
                staged[id(leaf)] = (leaf, self._buffers[key].copy_(leaf))
            return staged[id(leaf)][1]

        return map_tensors(super().batch_to_device(batch, device, non_blocking=non_blocking), stage)


@caught_by("ACC-28")
class ForwardedPositionAccelerator(SameCPU):
    """Reads one batch ahead, and forwards the loader's own state_dict with everything else of the loader."""

    # Contract, process_dataloader: "So a result that reads ahead must not forward the loader's."
    # A loader that knows its position is saved one batch too far: a run that continues in the midst of an epoch never
    # trains on the batch that had been read and not handed out.

    name = "forwarded_position"
    auto_priority = None

    def process_dataloader(self, loader: Any, device: torch.device) -> Any:
        return _Ahead(loader)


_END = object()


class _Ahead:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return _one_ahead(iter(self.loader))

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)


def _one_ahead(loaded: Iterator[Any]) -> Iterator[Any]:
    batch, error = _read(loaded)
    while batch is not _END:
        following = _read(loaded)
        yield batch
        batch, error = following
    if error is not None:
        raise error


def _read(loaded: Iterator[Any]) -> tuple[Any, Exception | None]:
    try:
        return next(loaded), None
    except StopIteration:
        return _END, None
    except Exception as error:  # raised at its batch
        return _END, error


@caught_by("ACC-31")
class FlushedDenormalsAccelerator(SameCPU):
    """Makes the process flush denormal numbers to zero when the device is set up."""

    # Contract, setup_device: "torch's defaults and switches, and the CPU's random state, are left unchanged here as in
    # `setup` and `teardown`."
    # Numbers below 1.2e-38 are zero for the rest of the process, in the user's own code after the fit too: results
    # differ from those of the same program without the plugin, and nothing says so.

    name = "flushed_denormals"
    auto_priority = None

    def setup_device(self, device: torch.device) -> None:
        super().setup_device(device)
        torch.set_flush_denormal(True)


@caught_by("ACC-54")
class AllCoresAccelerator(SameCPU):
    """Ends a run by giving the process every core of the machine."""

    # Contract, teardown: "No more memory is allocated afterwards than before the set-up, and the process has the cores,
    # signal handlers and working folder that it had."
    # A process that taskset, Slurm or its launcher bound to some cores runs on all after its first fit, and takes
    # those of the other ranks and of other users' jobs.

    name = "all_cores"
    auto_priority = None

    def teardown(self) -> None:
        super().teardown()
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the runtime may have bound the process


@caught_by("ACC-14")
class OneBufferStateAccelerator(SameCPU):
    """Returns each state of the generator in the same tensor."""

    # Contract, set_rng_state: "Restore the state of the device's random-number generator." (state: "what
    # `get_rng_state` returned.")
    # A state that was taken to be restored later changes when another one is taken, as for a checkpoint in between:
    # the generator is set to that, and a run draws numbers twice.

    name = "one_buffer_state"
    auto_priority = None

    def __init__(self) -> None:
        super().__init__()
        self._state: torch.Tensor | None = None

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        state = super().get_rng_state(device)
        if self._state is None:
            self._state = torch.empty_like(state)
        return self._state.copy_(state)


@caught_by("ACC-58")
class CachedRegionsAccelerator(SameCPU):
    """Makes one region per name and enters it again, also while it is entered."""

    # Contract, profile_region: "Called on any rank and thread, while nothing is profiled too; regions nest."
    # A region inside one of the same name, as of a layer that calls itself or of two threads, takes the place of the
    # outer one: the trace lacks its end, and the time that users read off it is wrong.

    name = "cached_regions"
    auto_priority = None

    def __init__(self) -> None:
        super().__init__()
        self._regions: dict[str, Any] = {}

    def profile_region(self, name: str) -> Any:
        if name not in self._regions:
            self._regions[name] = super().profile_region(name)
        return self._regions[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_regions": {}}
