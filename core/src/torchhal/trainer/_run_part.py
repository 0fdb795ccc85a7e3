"""Refer from a part of a run back to the run without keeping it alive."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class RunPart(Generic[R]):
    """Base of parts that a run owns and that access the run, such as a loop.

    With a strong reference back, model and optimizer would stay in memory until a garbage collection.
    """

    def __init__(self, run: R) -> None:
        self._run = weakref.ref(run)

    @property
    def run(self) -> R:
        """The run; ReferenceError once it is freed."""
        run = self._run()
        if run is None:
            raise ReferenceError(f"the run of this {type(self).__name__} is gone: keep its Trainer as long as this")
        return run

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": self.run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._run = weakref.ref(state["_run"])
