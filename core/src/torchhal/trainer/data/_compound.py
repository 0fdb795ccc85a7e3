"""Define loaders that draw their batches from other loaders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class CompoundLoader(ABC):
    """An iterable of batches that are made of other loaders' batches, as of two datasets at once.

    A Trainer shares each of these loaders out over the ranks, announces epochs to their samplers, and ends their
    workers.

    .. versionadded:: 0.2
    """

    @property
    @abstractmethod
    def loaders(self) -> list[Any]:
        """Those that it reads."""

    @abstractmethod
    def with_loaders(self, loaders: list[Any]) -> CompoundLoader:
        """Return the same of other loaders.

        Args:
            loaders: in the order of :attr:`loaders`, and as many.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Return an iterator that has begun those of :attr:`loaders`.

        A method ``_shutdown_workers`` of it is called where it isn't read to its end.
        """


def loaders_of(loader: Any) -> list[Any]:
    """Return the loaders that batches come from: those of a :class:`CompoundLoader`, at any depth, or itself."""
    if not isinstance(loader, CompoundLoader):
        return [loader]
    return [inner for each in loader.loaders for inner in loaders_of(each)]
