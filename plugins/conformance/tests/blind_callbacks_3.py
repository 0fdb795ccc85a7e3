"""Callbacks of one defect each in their hooks, written from the contract by somebody who had read no check."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from blind_callbacks import RateRecord
from zoo import caught_by


@caught_by("GEN-10", kind="callback")
class AsyncHook(RateRecord):
    """Has a hook that is a coroutine."""

    # on_train_epoch_end: "-> None"
    # It is made and never awaited.

    async def on_train_epoch_end(self, trainer: Any, module: Any) -> None:  # type: ignore[override]
        self.epochs.append(self.batches)


def _look(module: Any, inputs: Any, output: Any) -> None:
    pass


@caught_by("CBK-11")
class LeavesModuleHooks(RateRecord):
    """Registers a hook at the model for each call, and removes none."""

    # teardown: "Clean up after everything of the call"
    # After ten calls each forward is recorded ten times.

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.register_forward_hook(_look)


@caught_by("CBK-11")
class LeavesSignalHandler(RateRecord):
    """Handles SIGUSR1 while it trains, and afterwards too."""

    # teardown: "Clean up after everything of the call"

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, lambda number, frame: None)


@caught_by("CBK-13", says="after rank 1 failed")
class MeetsInException(RateRecord):
    """Waits for the other ranks before it reports an error."""

    # on_exception: "other ranks may have ended, so don't communicate"
    # The job hangs where one rank fails alone.

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if dist.is_initialized():
            dist.barrier()


@caught_by("CBK-12")
class ChangesBatch(RateRecord):
    """Scales the samples where they are."""

    # on_train_batch_start: "Called before each training batch": it is given to look at.
    # Data that is in memory once is scaled anew in each epoch.

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for tensor in batch.values() if isinstance(batch, dict) else batch:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.mul_(0.5)


@caught_by("CBK-12")
class TakesOutputs(RateRecord):
    """Takes the loss out of what the step returned."""

    # on_train_batch_end: "outputs: what `training_step` returned, without the graph"
    # The callbacks after it, and the model's hook, have none.

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if isinstance(outputs, dict):
            outputs.pop("loss", None)
        elif isinstance(outputs, torch.Tensor):
            outputs.zero_()


@caught_by("CBK-12")
class KeepsGraph(RateRecord):
    """Keeps the loss of each step with its graph."""

    # on_before_backward(loss): the one with the graph.
    # Memory grows with each step until the device has none.

    def __init__(self, keep: int = 1000) -> None:
        super().__init__(keep)
        self.losses: list[torch.Tensor] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self.losses.append(loss)


@caught_by("CBK-08")
class ReplacesUnknown(RateRecord):
    """Stands in for a callback that no Trainer adds."""

    # replaces: ""progress_bar"`, `"model_summary"`, `"checkpoint"`, or "" for none"
    # The Trainer adds its own progress bar as well.

    replaces = "progress"


@caught_by("CBK-12")
class SeedsValidation(RateRecord):
    """Seeds torch's generator before each validation, for the same samples each time."""

    # Callback: "run code beside the model"
    # Each epoch of training draws the same masks of dropout.

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        torch.manual_seed(0)


@caught_by("CBK-12")
class DrawsNumbers(RateRecord):
    """Chooses by torch's generator which batch it looks at."""

    # Callback: "run code beside the model"
    # A run with it has other random numbers than one without.

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.chosen = bool(torch.rand(()) < 0.1)


@caught_by("CBK-12")
class LeavesEvalMode(RateRecord):
    """Puts the model into evaluation mode to look at it after an epoch."""

    # Callback: "run code beside the model"
    # From the second epoch on there is no dropout, and batch norm has stopped.

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.eval()
