"""Six accelerators with one mistake each, over torchhal's CPUAccelerator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from zoo import caught_by

from torchhal.accelerators import CPUAccelerator
from torchhal.pytree import map_tensors, move_to_device, moves_itself


@caught_by("ACC-50")
class StagingRingAccelerator(CPUAccelerator):
    """batch_to_device copies into two sets of buffers by turns: the third batch overwrites the first."""

    # accelerator.md, batch_to_device: "Return `batch` with every tensor in it on `device`. ... The same structure; the
    # tensors' values, dtypes and shapes are unchanged."
    # Suffers: what keeps batches (a predict_step that returns its inputs, a memory bank, several loaders read ahead)
    # finds the last two in place of all of them; nothing raises.

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[Any, torch.Tensor] = {}
        self._turn = 0

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        self._turn ^= 1
        position = 0

        def move(leaf: Any) -> Any:
            nonlocal position
            if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.requires_grad:
                return move_to_device(leaf, device, non_blocking=non_blocking)
            position += 1
            key = (self._turn, position, leaf.shape, leaf.dtype)
            if key not in self._buffers:
                self._buffers[key] = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            with torch.no_grad():
                return self._buffers[key].copy_(leaf, non_blocking=non_blocking)

        return map_tensors(batch, move, is_leaf=moves_itself)

    def teardown(self) -> None:
        self._buffers.clear()
        super().teardown()


@caught_by("ACC-51")
class SameAddressAccelerator(CPUAccelerator):
    """batch_to_device moves a tensor that occurs twice once, and knows it by address, shape and dtype alone."""

    # accelerator.md, batch_to_device: "tensors of any dtype, shape and strides ... The same structure; the tensors'
    # values, dtypes and shapes are unchanged."
    # Suffers: a square matrix and its transpose in one batch (pairs of scores, adjacency, attention bias), which differ
    # in strides only, both arrive as the first; likewise a complex tensor and its conjugate view. It trains on these.

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        moved: dict[Any, Any] = {}

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or not leaf.numel():
                return move_to_device(leaf, device, non_blocking=non_blocking)
            key = (leaf.device, leaf.data_ptr(), leaf.shape, leaf.dtype)
            if key not in moved:
                moved[key] = move_to_device(leaf, device, non_blocking=non_blocking)
            return moved[key]

        return map_tensors(batch, move, is_leaf=moves_itself)


@caught_by("ACC-14")
class OneStateBufferAccelerator(CPUAccelerator):
    """get_rng_state returns the same tensor each time, with new contents."""

    # accelerator.md, get_rng_state: "Return the state of the device's random-number generator. ... A 1-d uint8 tensor
    # on the CPU, for `set_rng_state`."
    # Suffers: two snapshots (a nested "keep the random state" block, one for the checkpoint and one to restore after a
    # validation) are one: restoring the older continues from the newer. Runs can't be repeated, and nobody sees why.

    def __init__(self) -> None:
        super().__init__()
        self._state: torch.Tensor | None = None

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        state = super().get_rng_state(device)
        if self._state is None or self._state.shape != state.shape:
            self._state = state
        else:
            self._state.copy_(state)  # 5 kB each step otherwise
        return self._state


class _Resident:
    """A loader whose batches stay in memory after the first full pass."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches) if self._batches is not None else _Recording(self, iter(self._loader))

    def keep(self, batches: list[Any]) -> None:
        self._batches = batches

    def close(self) -> None:
        self._batches = None


class _Recording:
    def __init__(self, owner: _Resident, source: Iterator[Any]) -> None:
        self._owner, self._source, self._seen = owner, source, []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._source is None:
            raise StopIteration
        try:
            batch = next(self._source)
        except StopIteration:
            self._owner.keep(self._seen)
            raise
        self._seen.append(batch)
        return batch

    def close(self) -> None:
        self._source = None  # an unfinished pass is not kept


@caught_by("ACC-53")
class ResidentDataAccelerator(CPUAccelerator):
    """process_dataloader keeps the batches of a small loader after its first pass and gives these ever after."""

    # accelerator.md, process_dataloader: "It gives the batches of `loader`, all of them in their order, with their
    # tensors on any device, each time it is iterated".
    # Suffers: shuffling and augmentation are those of the first epoch in all epochs: worse generalisation, and nothing
    # but the number of seconds per epoch shows it. A step that changes its batch in place changes it for all epochs.

    def process_dataloader(self, loader: Any, device: torch.device) -> Iterable[Any]:
        try:
            small = len(loader) <= 256
        except TypeError:
            return super().process_dataloader(loader, device)
        return _Resident(loader) if small else super().process_dataloader(loader, device)


class _ReadAhead:
    """A loader of which two batches are made ready before they are asked for."""

    def __init__(self, loader: Any, accelerator: CPUAccelerator, device: torch.device) -> None:
        self._loader, self._accelerator, self._device = loader, accelerator, device

    def __getattr__(self, name: str) -> Any:  # sampler, dataset, batch_size, ...
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return _Ahead(iter(self._loader), lambda batch: self._accelerator.batch_to_device(batch, self._device))

    def close(self) -> None:
        """Nothing is left: each iterator has its own."""


class _SizedReadAhead(_ReadAhead):
    def __len__(self) -> int:
        return len(self._loader)


class _Ahead:
    def __init__(self, source: Iterator[Any], move: Any) -> None:
        self._source, self._move = source, move
        self._ready: deque[tuple[Any, BaseException | None]] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._source is not None and len(self._ready) < 3:
            try:
                self._ready.append((self._move(next(self._source)), None))
            except BaseException as error:
                self._ready.append((None, error))
                self._source = None
        if not self._ready:
            raise StopIteration
        batch, error = self._ready.popleft()
        if error is not None:
            raise error
        return batch

    def close(self) -> None:
        self._source = None
        self._ready.clear()


@caught_by("ACC-28")
class ForwardsPositionAccelerator(CPUAccelerator):
    """process_dataloader reads two batches ahead and forwards every attribute, the loader's state_dict too."""

    # accelerator.md, process_dataloader: "If the result has `state_dict` and `load_state_dict`, these are used instead:
    # in the format of the loader's own, as of the batch that was handed out last. So a result that reads ahead must not
    # forward the loader's."
    # Suffers: a run with a stateful loader that is resumed in the midst of an epoch leaves out the two batches that had
    # been read and not trained on, at each resume.

    def process_dataloader(self, loader: Any, device: torch.device) -> Iterable[Any]:
        return (_SizedReadAhead if hasattr(loader, "__len__") else _ReadAhead)(loader, self, device)


@caught_by("ACC-31")
class FlushesDenormalsAccelerator(CPUAccelerator):
    """setup_device makes the CPU flush denormal numbers to zero, and nothing undoes it."""

    # accelerator.md, setup_device: "torch's defaults and switches, and the CPU's random state, are left unchanged
    # here as in `setup` and `teardown`."
    # Suffers: small numbers (variances in Adam, products of probabilities, float64 sums in the program's own
    # statistics) become zero from the first fit on, also after it, in all code of the thread; results differ from those
    # of another accelerator, and from those of the same program without a fit.

    def setup_device(self, device: torch.device) -> None:
        super().setup_device(device)
        torch.set_flush_denormal(True)
