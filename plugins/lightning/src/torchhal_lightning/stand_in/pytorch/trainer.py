"""Lightning's Trainer and the words of its states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchhal_lightning._install import annotated
from torchhal_lightning._words import Word
from torchhal_lightning.stand_in.pytorch._trainer_arguments import Arguments
from torchhal_lightning.stand_in.pytorch.utilities import seed_everything
from torchhal_lightning.trainer import Trainer as _Trainer


class Trainer(_Trainer):
    """The facade, with default callbacks and loggers of the stand-in."""

    tree = "torchhal_lightning.stand_in.pytorch"

    __init__ = annotated(_Trainer.__init__, Arguments.__init__)
    fit = annotated(_Trainer.fit, Arguments.fit)
    validate = annotated(_Trainer.validate, Arguments.validate)
    test = annotated(_Trainer.test, Arguments.test)
    predict = annotated(_Trainer.predict, Arguments.predict)


class _State(str, Enum):
    """A word of a Trainer's state."""

    __str__ = str.__str__
    __hash__ = str.__hash__

    @property
    def evaluating(self) -> bool:
        return Word(self.value).evaluating

    @property
    def dataloader_prefix(self) -> str:
        return Word(self.value).dataloader_prefix

    @property
    def stopped(self) -> bool:
        return Word(self.value).stopped


class TrainerFn(_State):
    """What was called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(_State):
    """What runs."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class TrainerStatus(_State):
    """How far a call is."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"


@dataclass
class TrainerState:
    """Function, stage and status."""

    status: Any = TrainerStatus.INITIALIZING
    fn: Any = None
    stage: Any = None

    @property
    def finished(self) -> bool:
        return bool(self.status == TrainerStatus.FINISHED)

    @property
    def stopped(self) -> bool:
        return bool(self.status.stopped)


__all__ = ["RunningStage", "Trainer", "TrainerFn", "TrainerState", "TrainerStatus", "seed_everything"]
