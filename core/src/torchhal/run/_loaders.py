"""Iterate a loader that a loop has set up as a run hands its batches out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class SetupLoader:
    """A loader as setup returns it: iterating it gives this rank's share of its batches, on its device.

    All else is that of the loader, its length included.

    Args:
        loader: the user's.
        batches: returns the iterator of a pass over the loader.
    """

    def __init__(self, loader: Any, batches: Callable[[Any], Iterator[Any]]) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_loader", "_batches"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._loader!r})"


def given_loader(loader: Any) -> Any:
    """Return the user's loader of one that setup has returned; another one itself."""
    return loader._loader if isinstance(loader, SetupLoader) else loader
