"""Accelerators that differ from core's CPU in one mistake each."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from sound_components import SameCPU
from zoo import caught_by

from torchhal.pytree import map_tensors, moves_itself


@caught_by("ACC-02")
class TrailingCommaAccelerator(SameCPU):
    """``"2,"`` selects the first two devices, as the comma at the end is dropped before the text is read."""

    # Contract, parse_devices: '"2,"` for the one with index 2.'
    # A user who asks for device 2 alone gets two processes on devices 0 and 1, which may be other people's.

    name = "trailing_comma"
    auto_priority = None

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(devices, str):
            text = devices.strip().removesuffix(",").strip()
            if text.isascii() and text.isdigit():
                devices = text
        return super().parse_devices(devices)


@caught_by("ACC-50")
class StaticInputsAccelerator(SameCPU):
    """Each batch is copied into the input buffers of the batch before, to save allocations (and for graph replay)."""

    # Contract, batch_to_device: "Return `batch` with every tensor in it on `device`. ... the tensors' values, dtypes
    # and shapes are unchanged."
    # A batch that was returned before takes the values of the next one: predictions that hold parts of their batches,
    # and validation outputs that are kept until the end of the epoch, are all those of the last batch.

    name = "static_inputs"
    auto_priority = None

    def __init__(self) -> None:
        super().__init__()
        self._inputs: dict[tuple[Any, ...], torch.Tensor] = {}

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        moved = super().batch_to_device(batch, device, non_blocking=non_blocking)
        position = itertools.count()

        def into_static(leaf: Any) -> Any:
            if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.requires_grad:
                return leaf
            if leaf.is_quantized or leaf.is_nested:
                return leaf
            key = (next(position), leaf.dtype, leaf.device, leaf.shape, leaf.stride())
            if key not in self._inputs:
                with torch.inference_mode(False):  # a sanity check comes first, and training writes to it later
                    self._inputs[key] = torch.empty_like(leaf)
            return self._inputs[key].copy_(leaf)

        return map_tensors(moved, into_static, is_leaf=moves_itself)

    def teardown(self) -> None:
        super().teardown()
        self._inputs.clear()


class _Ahead:
    """An iterator that has the next batch moved while the present one is trained on."""

    def __init__(self, iterator: Iterator[Any], length: int | None, move: Callable[[Any], Any]) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._left = length
        self._move = move
        self._ready: deque[tuple[bool, Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._ready:
            self._fetch()
        failed, value = self._ready.popleft()
        if failed:
            raise value
        if self._left is None or self._left > 0:
            self._fetch()
        return value

    def _fetch(self) -> None:
        try:
            if self._iterator is None:
                raise StopIteration
            batch = next(self._iterator)
            if self._left is not None:
                self._left -= 1
            self._ready.append((False, self._move(batch)))
        except BaseException as error:
            self._ready.append((True, error))

    def close(self) -> None:
        self._iterator = None
        self._ready.clear()


class _AheadLoader:
    """A loader whose iterators are one batch ahead; all else is the given loader's."""

    def __init__(self, loader: Any, move: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._move = move

    def __iter__(self) -> Iterator[Any]:
        try:
            length: int | None = len(self._loader)
        except (TypeError, NotImplementedError):
            length = None
        return _Ahead(iter(self._loader), length, self._move)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def close(self) -> None:
        """Keep the given loader as it is: it isn't this one's to close."""


@caught_by("ACC-28")
class TransparentPrefetchAccelerator(SameCPU):
    """The loader that reads a batch ahead forwards every attribute it lacks, ``state_dict`` too, to the given one."""

    # Contract, process_dataloader: "If the result has `state_dict` and `load_state_dict`, these are used instead: in
    # the format of the loader's own, as of the batch that was handed out last. So a result that reads ahead must not
    # forward the loader's."
    # With a stateful loader a checkpoint in the midst of an epoch counts the batch that was only read: the continued
    # run never trains on it, in silence, at each resume.

    name = "transparent_prefetch"
    auto_priority = None

    def process_dataloader(self, loader: Any, device: torch.device) -> Iterable[Any]:
        return _AheadLoader(loader, lambda batch: self.batch_to_device(batch, device, non_blocking=True))


@caught_by("ACC-31")
class WarmUpAccelerator(SameCPU):
    """``setup`` warms the kernels up with matrices that it draws from the CPU's generator."""

    # Contract, setup_device: "torch's defaults and switches, and the CPU's random state, are left unchanged here as in
    # `setup` and `teardown`."
    # After the user's seed, dropout and shuffling draw other numbers than on any other accelerator: a run can't be
    # reproduced elsewhere, nor an earlier one here.

    name = "warm_up"
    auto_priority = None

    def setup(self, trainer: Any = None) -> None:
        super().setup(trainer)
        matrix = torch.randn(256, 256)
        for _ in range(3):
            matrix = torch.tanh(matrix @ matrix)


@caught_by("ACC-58")
class OneRegionPerNameAccelerator(SameCPU):
    """``profile_region`` keeps one context for each name and returns it again, to spare a hot path the objects."""

    # Contract, profile_region: "Called on any rank and thread, while nothing is profiled too; regions nest."
    # A region inside of one with the same name (blocks that hold blocks, two threads) ends the outer one when it
    # begins: the trace shows the outer one too short, and the user optimizes the wrong part.

    name = "one_region_per_name"
    auto_priority = None

    def __init__(self) -> None:
        super().__init__()
        self._regions: dict[str, AbstractContextManager[Any]] = {}

    def profile_region(self, name: str) -> AbstractContextManager[Any]:
        if name not in self._regions:
            self._regions[name] = super().profile_region(name)
        return self._regions[name]


@caught_by("ACC-26")
class SinceLastReadAccelerator(SameCPU):
    """``device_stats`` divides by the time since it was read last, which two quick readings make zero."""

    # Contract, device_stats: "Called by `torchhal doctor` for each device that a process sees, and by callbacks at any
    # time on any rank. It never raises: a reading that can't be made ... is left out."
    # The clock ticks every 10 ms: a callback that reads at short intervals, or the doctor, which reads device after
    # device, ends with ZeroDivisionError, and a training run with it.

    name = "since_last_read"
    auto_priority = None

    def __init__(self) -> None:
        super().__init__()
        self._before: tuple[float, float] | None = None

    def device_stats(self, device: torch.device) -> dict[str, float]:
        stats = super().device_stats(device)
        now = os.times()
        used = now.user + now.system
        if self._before is not None:
            used_before, elapsed_before = self._before
            share = (used - used_before) / (now.elapsed - elapsed_before) / self.device_count()
            stats["utilization_percent"] = min(100.0, max(0.0, 100.0 * share))
        self._before = (used, now.elapsed)
        return stats
