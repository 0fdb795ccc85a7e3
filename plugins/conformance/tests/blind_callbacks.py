"""Callbacks of one defect each, written from the contract by somebody who had read no check."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from zoo import caught_by

from torchhal.trainer.callbacks import Callback


class RateRecord(Callback):
    """A sound callback with state: counts batches, and records the learning rate of each optimizer step.

    Args:
        keep: number of learning rates that it keeps.
    """

    def __init__(self, keep: int = 1000) -> None:
        self.keep = keep
        self.batches = 0
        self.epochs: list[int] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(self.batches)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates = [*self.rates, float(optimizer.param_groups[0]["lr"])][-self.keep :]

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "epochs": list(self.epochs), "rates": list(self.rates)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]
        self.epochs = list(state_dict["epochs"])
        self.rates = list(state_dict["rates"])


# -- state -------------------------------------------------------------------------------------------------------------


@caught_by("CBK-02")
class ForgetsRates(RateRecord):
    """Restores its counts, and not the list that was added later."""

    # load_state_dict: "Continue from `state_dict`."
    # After a resume the record begins anew.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "rates": []})


@dataclass
class Record:
    batches: int
    epochs: list[int]
    rates: list[float]


@caught_by("CBK-01", says="weights_only")
class ObjectAsState(RateRecord):
    """Saves an object of its own class."""

    # state_dict: "as plain data"
    # A checkpoint that is read with weights_only=True, or without this plugin, can't be read.

    def state_dict(self) -> dict[str, Any]:
        return {"record": Record(self.batches, list(self.epochs), list(self.rates))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(vars(state_dict["record"]))


@caught_by("CBK-02")
class StateSinceFit(RateRecord):
    """Has a state once training has begun."""

    # state_dict, load_state_dict: "Called on every rank before training starts."
    # Loading fails in the run that needs it: there the attribute isn't there yet.

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if not hasattr(self, "history"):
            self.history: list[int] = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.clear()
        self.history += state_dict["epochs"]
        super().load_state_dict(state_dict)


@caught_by("CBK-05", says="HANG")
class GathersOnRankZero(RateRecord):
    """Sums its counts over the ranks, on the rank whose state is saved."""

    # Callback: "A hook that calls a collective must call it on every rank."
    # The job hangs with the first checkpoint.

    def state_dict(self) -> dict[str, Any]:
        if dist.is_initialized() and dist.get_rank() == 0:
            dist.all_reduce(torch.tensor(self.batches))
        return super().state_dict()


@caught_by("CBK-04")
class HoldsLock(RateRecord):
    """Guards its record by a lock."""

    # A launcher sends callbacks to other processes with the Trainer: a lock can't be pickled.

    def __init__(self, keep: int = 1000) -> None:
        super().__init__(keep)
        self.lock = threading.Lock()


@caught_by("CBK-04")
class HoldsTrainer(RateRecord):
    """Keeps the Trainer and the model of the last run."""

    # teardown: "Clean up after everything of the call"
    # A second model can't be loaded while the first is in memory, and the callback can't be sent to a process.

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.trainer, self.module = trainer, module


# -- hooks -------------------------------------------------------------------------------------------------------------


@caught_by("CBK-01", says="is no hook")
class OldHookName(RateRecord):
    """Counts epochs in a hook of another library."""

    # Callback: "of which only the overridden hooks are called"
    # Nothing is counted, and nobody says why.

    def on_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(self.batches)


@caught_by("GEN-10", kind="callback")
class OldSignature(RateRecord):
    """Has the parameters that the hook had in an earlier release of another library."""

    # on_train_batch_end(trainer, module, outputs, batch, batch_idx)
    # The first batch ends in a TypeError.

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        self.batches += 1


@caught_by("CBK-01")
class OwnWayToFinish(RateRecord):
    """Needs what the start of training has made, at the end of each evaluation."""

    # on_validation_epoch_end: "Called after the last batch of a validation": of validate() too.
    # A validation without training fails.

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.best: dict[str, Any] = {}

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.best.update(trainer.callback_metrics)


@caught_by("CBK-01")
class FitAndTestOnly(RateRecord):
    """Knows two stages."""

    # setup: "stage: "fit", "validate", "test" or "predict""
    # validate() and predict() end in a KeyError.

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.title = {"fit": "training", "test": "test"}[stage]


@caught_by("CBK-01")
class OneFitOnly(RateRecord):
    """Refuses to be used again."""

    # setup: "Prepare for `fit`, `validate`, `test` or `predict`": each call of a Trainer.
    # The test after a fit fails.

    used = False

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if self.used:
            raise RuntimeError("make a new RateRecord for each run")
        self.used = True


@caught_by("SYS-05", kind="callback")
class TearsDownTraining(RateRecord):
    """Ends in its teardown what the start of training has begun."""

    # teardown: "Clean up after everything of the call, also after an error"
    # An error before training starts is replaced by an AttributeError.

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.timer = threading.Event()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            self.timer.set()
            del self.timer


@caught_by("CBK-01")
class RequiresLossTensor(RateRecord):
    """Takes each output for a dict with a loss."""

    # on_train_batch_end: "outputs: what `training_step` returned": a tensor, a dict, or None for a skipped batch.

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.loss = float(outputs["loss"])


@caught_by("CBK-05", says="HANG")
class ReducesOnRankZero(RateRecord):
    """Averages its count over the ranks, where it reports it."""

    # Callback: "A hook that calls a collective must call it on every rank."

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        super().on_train_epoch_end(trainer, module)
        if trainer.is_global_zero:
            trainer.strategy.barrier("report")


# -- the program's state -----------------------------------------------------------------------------------------------


@caught_by("CBK-01", says="requires grad")
class LeavesNoGrad(RateRecord):
    """Turns gradients off for its own measurements of a fit's end."""

    # teardown: "Clean up after everything of the call"
    # The program's next backward, outside of the Trainer, has no graph.

    def on_train_end(self, trainer: Any, module: Any) -> None:
        torch.set_grad_enabled(False)


@caught_by("CBK-06", says="optimizer_states")
class ClearsCheckpoint(RateRecord):
    """Leaves out of a checkpoint what it takes for too large."""

    # on_save_checkpoint: "the checkpoint, to which plain data may be added"
    # It can't be continued: the optimizer begins anew.

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint if "optimizer" in name]:
            del checkpoint[name]


@caught_by("CBK-01", says="weights_only")
class ObjectInCheckpoint(RateRecord):
    """Puts an object of its own class into the checkpoint."""

    # on_save_checkpoint: "to which plain data may be added"
    # It can't be read with weights_only=True.

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["rate_record"] = Record(self.batches, self.epochs, self.rates)
