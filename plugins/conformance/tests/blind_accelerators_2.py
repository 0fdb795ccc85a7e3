"""Blind defects: six accelerators with one mistake each."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from zoo import caught_by

from torchhal.accelerators import CPUAccelerator
from torchhal.pytree import map_tensors, moves_itself


@caught_by("ACC-50")
class StagingBufferAccelerator(CPUAccelerator):
    """``batch_to_device`` gives each batch in the same staging memory, which the next batch overwrites."""

    # docs/reference/accelerator.md, batch_to_device: "Returns: The same structure; the tensors' values, dtypes and
    # shapes are unchanged."
    # What a step keeps of its batch (predictions that are views of it, a replay buffer, the targets of an epoch's
    # metric) has the values of the last batch of that shape: metrics are computed on the wrong targets.

    def __init__(self) -> None:
        self._staging: dict[Any, torch.Tensor] = {}

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        used: dict[Any, int] = {}

        def stage(leaf: Any) -> Any:
            if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.requires_grad:
                return leaf
            if not leaf.numel() or not leaf.is_contiguous() or leaf.is_conj() or leaf.is_neg() or leaf.is_quantized:
                return leaf
            kind = (tuple(leaf.shape), leaf.dtype, torch.is_inference_mode_enabled())
            used[kind] = used.get(kind, 0) + 1
            return self._staging.setdefault((*kind, used[kind]), torch.empty_like(leaf)).copy_(leaf)

        moved = super().batch_to_device(batch, device, non_blocking=non_blocking)
        return map_tensors(moved, stage, is_leaf=moves_itself)

    def teardown(self) -> None:
        self._staging.clear()
        super().teardown()


class _ReadAhead:
    """A loader whose next batch is fetched before the last one is needed."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> _ReadAheadIterator:
        return _ReadAheadIterator(iter(self._loader))


class _ReadAheadIterator:
    depth = 2

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._ahead: deque[tuple[Any, Exception | None]] = deque()

    def __iter__(self) -> _ReadAheadIterator:
        return self

    def _fill(self) -> None:
        while self._batches is not None and len(self._ahead) < self.depth:
            try:
                self._ahead.append((next(self._batches), None))
            except StopIteration:
                self._batches = None
            except Exception as error:  # raised in its place
                self._ahead.append((None, error))
                self._batches = None

    def __next__(self) -> Any:
        self._fill()
        try:
            batch, error = self._ahead.popleft()
            if error is not None:
                raise error
            return batch
        except IndexError:  # nothing is left
            self.close()
            raise StopIteration from None

    def close(self) -> None:
        self._batches = None
        self._ahead.clear()


@caught_by("ACC-52")
class IndexErrorEndsEpochAccelerator(CPUAccelerator):
    """The loader of ``process_dataloader`` takes an IndexError of the dataset for the end of the data."""

    # docs/reference/accelerator.md, process_dataloader: "What `loader` raises, the iterator raises at that batch.", and
    # "It gives the batches of `loader`, all of them in their order".
    # One index that is out of range, in sample 1000 of a million, ends each epoch there: the run trains on a thousandth
    # of its data, and no error is shown.

    def process_dataloader(self, loader: Any, device: torch.device) -> Iterable[Any]:
        return _ReadAhead(loader) if hasattr(loader, "__len__") else loader


@caught_by("ACC-14")
class ReusedRngStateAccelerator(CPUAccelerator):
    """``get_rng_state`` returns one tensor at every call, so an earlier state becomes the latest one."""

    # docs/reference/accelerator.md, get_rng_state: "Return the state of the device's random-number generator." and
    # "A 1-d uint8 tensor on the CPU, for `set_rng_state`."
    # Activation checkpointing or a validation that is to leave the stream alone keeps a state; a checkpoint in between
    # asks for another; what is restored is the later one, and dropout masks differ between forward and recomputation.

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        state = super().get_rng_state(device)
        if self._state is None:
            self._state = torch.empty_like(state)
        return self._state.copy_(state)


@caught_by("ACC-31")
class FlushDenormalAccelerator(CPUAccelerator):
    """``setup_device`` tells the processor to flush denormal numbers to zero, and nothing undoes it."""

    # docs/reference/accelerator.md, setup_device: "torch's defaults and switches, and the CPU's random state, are left
    # unchanged here as in `setup` and `teardown`."
    # Small numbers are 0 from there on, in the run and in all that the process computes after it: other results than
    # on the same machine without this accelerator, and log(p) of a tiny p is -inf.

    def setup_device(self, device: torch.device) -> None:
        super().setup_device(device)
        torch.set_flush_denormal(True)


@caught_by("ACC-54")
class PinnedCoresAccelerator(CPUAccelerator):
    """``setup_device`` binds the process to half of its cores (one thread a core), and ``teardown`` keeps it there."""

    # docs/reference/accelerator.md, teardown: "Release what `setup_device` took."
    # The second run in the process sees half of the cores, the third a quarter: devices=-1 means other numbers of
    # processes, so that the global batch and the results change from fit to fit; all later child processes are bound.

    def __init__(self) -> None:
        self._is_bound = False

    def setup_device(self, device: torch.device) -> None:
        super().setup_device(device)
        if not self._is_bound and hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cores[: max(1, len(cores) // 2)])
            self._is_bound = True

    def teardown(self) -> None:
        self._is_bound = False
        super().teardown()


class _Prober:
    """A thread that asks the driver, whose calls must all come from one thread."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Any, queue.SimpleQueue[int]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="device prober", daemon=True).start()

    def _serve(self) -> None:
        while True:
            function, reply = self._requests.get()
            reply.put(function())

    def ask(self, function: Any) -> int:
        reply: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._requests.put((function, reply))
        return reply.get()


_prober: _Prober | None = None


@caught_by("ACC-55")
class ForkedCountHangsAccelerator(CPUAccelerator):
    """``device_count`` is answered by a thread of the process that asked first: a forked child waits for ever."""

    # docs/reference/accelerator.md, Accelerator: "Reading them, `availability`, `device_count` and `parse_devices`
    # initialise no device: a fork after them works."
    # The main process counts devices, workers are forked (start_method="fork", a preforking server), and each of them
    # stands still in its first device_count or parse_devices, without an error.

    def device_count(self) -> int:
        global _prober
        if _prober is None:
            _prober = _Prober()
        return _prober.ask(super().device_count)
