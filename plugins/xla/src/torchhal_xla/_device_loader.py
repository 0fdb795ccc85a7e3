"""Move batches to the device ahead of time, by torch_xla's own loader threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


class DeviceLoader:
    """A ``loader`` behind torch_xla's ``ParallelLoader``, which ``MpDeviceLoader`` is made of.

    Its attributes are the loader's. The loader's iterator is made by whoever asks for this one's, not by a thread, so
    that it draws its random numbers there; what a loader's thread meets is raised here, where torch_xla would end the
    epoch early without a word.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, ahead: int) -> None:
        self.loader = loader
        self.device = device
        self.ahead = ahead

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return _Ahead(iter(self.loader), self.device, self.ahead)


class _Ahead:
    def __init__(self, batches: Iterator[Any], device: torch.device, ahead: int) -> None:
        from torch_xla.distributed.parallel_loader import ParallelLoader

        self._source = _Source(batches)
        self._threads: Any = ParallelLoader(
            self._source, [device], loader_prefetch_size=ahead, device_prefetch_size=ahead
        )
        self._batches = self._threads.per_device_loader(device)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            if self._source.error is not None:
                raise self._source.error from None
            raise

    @property
    def _sampler_iter(self) -> Iterator[Any]:
        """The iterator that the loops read once more when all batches are used: the threads have read to the end."""
        return self

    def _shutdown_workers(self) -> None:
        """End the threads, then what they read from, when the loops call it as they do a DataLoader's."""
        self._threads.close()
        batches: Any = self._source.batches
        if not getattr(batches, "_persistent_workers", False) and hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


class _Source:
    """Batches for a thread that takes any error for the end: the error is kept."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise StopIteration from None
