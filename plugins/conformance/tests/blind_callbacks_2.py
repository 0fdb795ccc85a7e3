"""Callbacks of one defect each in what they keep, written from the contract by somebody who had read no check."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from blind_callbacks import RateRecord
from zoo import caught_by


@caught_by("CBK-06")
class SavesNothing(RateRecord):
    """Has counters that it doesn't save."""

    # state_dict: "Return what a resumed run needs".

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@caught_by("CBK-06")
class ResetsAtStart(RateRecord):
    """Begins at zero when training starts."""

    # on_train_start: "Called before the first epoch, after a checkpoint was loaded"
    # What was restored is lost: every resumed run counts from zero.

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.batches, self.epochs, self.rates = 0, [], []


@caught_by("CBK-06")
class LoadsTooEarly(RateRecord):
    """Restores itself from the checkpoint, and lets its preparation for training reset that."""

    # on_fit_start: "the checkpoint that the run continues from is loaded"
    # The same as above by the other hooks: the state is in the checkpoint, and of no use.

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["rate_record"] = super().state_dict()

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        super().load_state_dict(checkpoint["rate_record"])

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.batches, self.epochs, self.rates = 0, [], []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@caught_by("CBK-10")
class NeedsOwnEntry(RateRecord):
    """Reads its entry of a checkpoint that has none."""

    # on_load_checkpoint: "Called after a checkpoint was read for resuming": of any run.
    # A checkpoint of a run without this callback can't be continued with it.

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["rate_record"] = {"keep": self.keep}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.keep = checkpoint["rate_record"]["keep"]


@caught_by("CBK-07")
class LiveState(RateRecord):
    """Returns its own list, which grows afterwards."""

    # state_dict: "Return what a resumed run needs, as plain data."
    # Who takes a state before a trial, to go back to it, finds a later one.

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "epochs": self.epochs, "rates": self.rates}


@caught_by("CBK-07")
class KeepsGivenState(RateRecord):
    """Goes on with the very lists of the state that it was given."""

    # load_state_dict: "Continue from `state_dict`."
    # Two that are loaded from one state, such as the callbacks of two Trainers, count for each other.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches, self.epochs, self.rates = (state_dict[name] for name in ("batches", "epochs", "rates"))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))


@caught_by("CBK-07")
class EmptiesState(RateRecord):
    """Takes the entries out of the state while it restores them."""

    # load_state_dict: "Continue from `state_dict`."
    # A second load of the same checkpoint finds nothing.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict.pop("batches")
        self.epochs, self.rates = list(state_dict.pop("epochs")), list(state_dict.pop("rates"))


@caught_by("CBK-07")
class FlushesState(RateRecord):
    """Hands its record over with the state, and begins anew."""

    # state_dict: "Return what a resumed run needs". A checkpoint is no end of a run.
    # A run that is saved records other numbers than one that isn't.

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        self.batches, self.epochs, self.rates = 0, [], []
        return state


@caught_by("CBK-05")
class RestoredOnRankZero(RateRecord):
    """Restores its state on rank 0, which has saved it."""

    # load_state_dict: "Called on every rank"
    # The ranks decide differently after a resume.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            super().load_state_dict(state_dict)


@caught_by("CBK-09")
class SharedRecord(RateRecord):
    """Has one record for all objects of the class."""

    # Callback: "run code beside the model at fixed points of a run"; each object has a state of its own.
    # Two Trainers in one process, as in a sweep, add to one list.

    _all: ClassVar[list[float]] = []

    def __init__(self, keep: int = 1000) -> None:
        super().__init__(keep)
        self.rates = self._all

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches, self.epochs = state_dict["batches"], list(state_dict["epochs"])
        self.rates[:] = state_dict["rates"]


@caught_by("CBK-08")
class KeyOfObject(RateRecord):
    """Has a key of its own for each object, so that two never collide."""

    # state_key: "The name under which `state_dict` is saved."
    # A resumed run has other objects, and none finds its state.

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{id(self)}"


@caught_by("CBK-08")
class OneKeyForAll(RateRecord):
    """Takes a key that other classes have as well."""

    # state_key: "The name under which `state_dict` is saved."
    # Where its order among the callbacks changes it gets the state of another class.

    @property
    def state_key(self) -> str:
        return "Callback"


@caught_by("CBK-08")
class NoStringAsKey(RateRecord):
    """Has a class as its key."""

    # state_key: "-> str"

    @property
    def state_key(self) -> Any:
        return type(self)


@caught_by("CBK-04")
class CopyForgets(RateRecord):
    """Sends its arguments alone to another process."""

    # Callback: a launcher sends the callbacks of a Trainer, in use or not, to other processes.
    # After a first fit the second, with spawned ranks, counts from zero.

    def __reduce__(self) -> Any:
        return type(self), (self.keep,)


@caught_by("CBK-09")
class CopyIsSame(RateRecord):
    """Returns itself where it is copied."""

    # Callback: each object has a state of its own.
    # Trials of a search that copy the callbacks of one template count together.

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyIsSame:
        return self
