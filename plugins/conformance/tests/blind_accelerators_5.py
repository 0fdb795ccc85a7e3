"""Defective accelerators: each differs from core's CPU in one thing."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from zoo import caught_by

from torchhal.accelerators import CPUAccelerator
from torchhal.pytree import map_tensors, moves_itself

_log = logging.getLogger(__name__)


@caught_by("ACC-50")
class StaticBuffersAccelerator(CPUAccelerator):
    """Copies every batch into the same buffers, one per place, shape and dtype, which the next batch overwrites."""

    # "Return `batch` with every tensor in it on `device`. [...] the tensors' values, dtypes and shapes are unchanged."
    # Buffers at fixed addresses, as captured graphs want them: whoever keeps a batch, or a part of it, finds the values
    # of a later one in it. predict returns the last batch's inputs for all batches, a replay buffer holds one sample.

    name: ClassVar[str] = "static_buffers"
    auto_priority: ClassVar[int | None] = None

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        moved = super().batch_to_device(batch, device, non_blocking=non_blocking)
        place = 0

        def into_buffer(leaf: Any) -> Any:
            nonlocal place
            if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.requires_grad:
                return leaf
            place += 1
            key = (place, leaf.shape, leaf.dtype)
            if key not in self._buffers:
                with torch.inference_mode(False):  # a validation's buffers are used in training, too
                    self._buffers[key] = torch.empty_like(leaf, device=device)
            return self._buffers[key].copy_(leaf, non_blocking=non_blocking).detach()

        return map_tensors(moved, into_buffer, is_leaf=moves_itself)

    def teardown(self) -> None:
        self._buffers.clear()
        super().teardown()


@caught_by("ACC-28")
class QuietPrefetchAccelerator(CPUAccelerator):
    """Reads batches ahead in a thread, and ends the epoch where the loader has raised an error."""

    # "What `loader` raises, the iterator raises at that batch."
    # A corrupt sample or a lost network mount in the middle of an epoch ends the epoch there, with a line in the log:
    # every epoch trains on the first part of the data only, and the run is reported as a success.

    name: ClassVar[str] = "quiet_prefetch"
    auto_priority: ClassVar[int | None] = None

    def process_dataloader(self, loader: Any, device: torch.device) -> Iterable[Any]:
        return _Prefetched(loader)


class _Prefetched:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _Reader(iter(self._loader))


class _Reader:
    """The batches of an iterator, of which up to two wait in a queue."""

    _END = object()

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches: Iterator[Any] = batches
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=2)
        self._has_begun = threading.Event()
        self._stopped = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()
        self._has_begun.wait()  # the sampler has drawn its seed before the caller draws random numbers

    def _read(self) -> None:
        try:
            while not self._stopped.is_set():
                batch = next(self._batches, self._END)
                if batch is self._END:
                    break
                self._put(batch)
        except Exception:
            _log.exception("the prefetching of batches has ended")
        finally:
            self._put(self._END)

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.05)
                break
            except queue.Full:
                continue
        self._has_begun.set()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._END if self._ended else self._queue.get()
        if batch is self._END:
            self.close()
            raise StopIteration
        return batch

    def close(self) -> None:
        self._ended = True
        self._stopped.set()
        self._thread.join()
        self._batches = iter(())


class AllCoresAccelerator(CPUAccelerator):
    """Counts the cores of the machine, not those that this process may run on."""

    # "Return the number of devices this process can see, 0 without hardware; in a forked child, too."
    # In a job that was given 4 of 128 cores, devices=-1 starts 128 processes, which share the four: training is slower
    # than in one process, and often the job's memory is too small for as many copies of the model.

    name: ClassVar[str] = "all_cores"
    auto_priority: ClassVar[int | None] = None

    def device_count(self) -> int:
        return os.cpu_count() or 1


@caught_by("ACC-31")
class FastMatmulAccelerator(CPUAccelerator):
    """Lets matrix products run with fewer digits in `setup`, for the rest of the process."""

    # "torch's defaults and switches, and the CPU's random state, are left unchanged here as in `setup` and `teardown`."
    # The user's own torch.set_float32_matmul_precision is overruled, and all that the program computes after the run
    # (a reference in "highest", another model) has tf32's digits without anybody having asked for it.

    name: ClassVar[str] = "fast_matmul"
    auto_priority: ClassVar[int | None] = None

    def setup(self, trainer: Any = None) -> None:
        super().setup(trainer)
        torch.set_float32_matmul_precision("high")


@caught_by("ACC-14")
class SeedAsStateAccelerator(CPUAccelerator):
    """Takes the seed for the generator's state, and forgets how much has been drawn since."""

    # "Return the state of the device's random-number generator." / "Restore the state of the device's random-number
    # generator."
    # A resumed run, and all that saves and restores the state around a piece of work, draws the random numbers of the
    # start again: the same dropout masks and noise as in the first epoch, without an error.

    name: ClassVar[str] = "seed_as_state"
    auto_priority: ClassVar[int | None] = None

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        seed = torch.default_generator.initial_seed() % 2**64
        return torch.tensor(list(seed.to_bytes(8, "little")), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.manual_seed(int.from_bytes(bytes(state.tolist()), "little"))


@caught_by("ACC-26")
class BusyShareAccelerator(CPUAccelerator):
    """Divides by the time since the last reading, which is 0 for two readings within one tick of the clock."""

    # "It never raises: a reading that can't be made, for want of a driver's library or of the right to use it, is left
    # out."
    # Two callbacks that log the sensors after the same step, or one that does so after every short step, end a run of
    # days with a ZeroDivisionError.

    name: ClassVar[str] = "busy_share"
    auto_priority: ClassVar[int | None] = None

    def __init__(self) -> None:
        self._last: os.times_result | None = None

    def device_stats(self, device: torch.device) -> dict[str, float]:
        stats = super().device_stats(device)
        now, before = os.times(), self._last
        self._last = now
        if before is not None:  # the first call has no period to look back on
            busy = now.user + now.system - before.user - before.system
            share = busy / (now.elapsed - before.elapsed) / self.device_count()
            stats["utilization_percent"] = min(100.0, 100.0 * share)
        return stats
