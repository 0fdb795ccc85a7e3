"""The base of what a Trainer owns and what refers back to it: the reference doesn't keep the Trainer alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal.trainer.trainer import Trainer


class TrainerPart:
    """A loop, say. With a strong reference back, model and optimizer would stay until a garbage collection."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    @property
    def trainer(self) -> Trainer:
        trainer = self._trainer()
        if trainer is None:
            raise ReferenceError(f"the Trainer of this {type(self).__name__} is gone: keep it as long as its parts")
        return trainer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": self.trainer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._trainer = weakref.ref(state["_trainer"])
