"""CombinedLoader: several loaders at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils import _pytree

from torchhal_lightning._combined_loaders import MODES, CombinedBatches


class CombinedLoader:
    """Iterates over loaders in lists, tuples and dicts, and yields (batch, batch_idx, dataloader_idx).

    Args:
        iterables: the loaders.
        mode: "min_size", "max_size", "max_size_cycle": how long an epoch is, see :class:`.CombinedBatches`;
            "sequential": one loader after the other.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode != "sequential" and mode not in MODES:
            raise ValueError(f"'mode' must be one of {', '.join(map(repr, (*MODES, 'sequential')))} (got {mode!r})")
        self._iterables = iterables
        self._mode = mode

    @property
    def iterables(self) -> Any:
        return self._iterables

    @property
    def flattened(self) -> list[Any]:
        return _pytree.tree_leaves(self._iterables)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        if self._mode == "sequential":
            for dataloader_idx, loader in enumerate(self.flattened):
                for batch_idx, batch in enumerate(loader):
                    yield batch, batch_idx, dataloader_idx
        else:
            for batch_idx, batch in enumerate(CombinedBatches(self._iterables, self._mode)):
                yield batch, batch_idx, 0

    def __len__(self) -> int:
        if self._mode == "sequential":
            return sum(map(len, self.flattened))
        return len(CombinedBatches(self._iterables, self._mode))
