"""Iterate a loader that a loop has set up as a run hands its batches out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any


class SetupLoader:
    """A loader as setup returns it: iterating it gives this rank's share of its batches, on its device.

    All else is that of the loader. It doesn't keep the run alive; when that has ended, it is the loader again.

    Args:
        loader: the user's.
        batches: a method of the run: the iterator of a pass over a loader.
        length: another one: how many batches of it this rank gets.
        trains: whether iterating it is an epoch of training.
    """

    def __init__(
        self,
        loader: Any,
        batches: Callable[[Any, bool], Iterator[Any]],
        length: Callable[[Any, bool], int],
        *,
        trains: bool,
    ) -> None:
        self._loader = loader
        self._batches = weakref.WeakMethod(batches)
        self._length = weakref.WeakMethod(length)
        self._trains = trains

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches()
        return iter(self._loader) if batches is None else batches(self._loader, self._trains)

    def __len__(self) -> int:
        length = self._length()
        return len(self._loader) if length is None else length(self._loader, self._trains)

    def __reduce__(self) -> Any:
        """Return, for a copy, the loader: the run's batches are those of one process."""
        return _itself, (self._loader,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._loader!r})"


def _itself(loader: Any) -> Any:
    return loader


def given_loader(loader: Any) -> Any:
    """Return the user's loader of one that setup has returned; another one itself."""
    return loader._loader if isinstance(loader, SetupLoader) else loader
