"""Record which samples of the dataset the batches of a loader hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torchhal.trainer.data._samplers import with_batch_sampler


class RecordingBatchSampler:
    """The batches of another batch sampler, whose indices are kept until :meth:`take` returns them.

    A loader with workers draws ahead of the batches that it gives, but in their order.
    """

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self.batches = batches
        self._drawn: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Sequence[int]]:
        self._drawn.clear()
        for indices in self.batches:
            self._drawn.append(list(indices))
            yield indices

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def take(self) -> list[int]:
        """Return the indices of the next batch."""
        return self._drawn.popleft()


def recording(loader: Any) -> Any:
    """Return a copy of ``loader`` that records its indices; ``loader`` itself where its batches have none."""
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None  # each item is a batch
        or not getattr(loader, "in_order", True)  # batches come as workers are done
    ):
        return loader
    return with_batch_sampler(loader, RecordingBatchSampler(loader.batch_sampler))


def recorder_of(loader: Any) -> RecordingBatchSampler | None:
    """Return what records the indices of ``loader``; None where nothing does."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, RecordingBatchSampler) else None
