"""Count the epochs, batches and optimizer steps of a fit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchhal.strategies import StepResult

if TYPE_CHECKING:
    from torchhal.trainer.data._training_data import TrainingData

COUNTERS = ("epoch", "batches_done", "global_step", "total_batches", "scheduler_steps", "validated_at")


class FitProgress:
    """Counters of a fit, the data they count in, and the time it has taken.

    They describe the state between two batches, so a checkpoint taken at any hook after a batch continues with the
    next one.

    Attributes:
        epoch: finished epochs, which is the index of the running one.
        batches_done: batches used of the running epoch.
        batch_idx: index of the current or latest batch in its epoch.
        global_step: optimizer steps taken.
        total_batches: batches used of all epochs.
        scheduler_steps: optimizer steps that schedulers with ``interval="step"`` have followed.
        validated_at: ``total_batches`` at the latest complete validation; -1 before the first.
        epoch_done: whether the running epoch is complete and only its hooks are left.
        stepped: whether the current batch has ended in an optimizer step that changed parameters.
    """

    def __init__(self, accumulate_grad_batches: int = 1) -> None:
        self.epoch = 0
        self.batches_done = 0
        self.batch_idx = 0
        self.global_step = 0
        self.total_batches = 0
        self.scheduler_steps = 0
        self.validated_at = -1
        self.epoch_done = False
        self.stepped = False
        self.accumulate = self.asked_accumulate = accumulate_grad_batches
        """Batches of one optimizer step: the present number, and the script's."""
        self.batch_size = self.step_size = 1
        """Samples of a batch of one replica, and those that an optimizer step takes over all replicas, or would, if the
        present replicas divided them; each batch counts as one if the loader doesn't provide its size."""
        self.counters_before: Mapping[str, Any] = {}
        """The counters of the run that this one continues."""
        self.has_gradients = False
        """Whether a backward has run since the last optimizer step."""
        self.data: TrainingData | None = None
        self.data_position: dict[str, Any] | None = None
        """This rank's position in the data at which the next epoch loop resumes."""
        self.generators: dict[str, Any] | None = None
        """The states of the random-number generators that are restored there."""
        self.settings_changed = False
        """Whether a hook has set an argument of the run that the loop has not read yet."""
        self.settings_differ = False
        """Whether it has set one that the ranks have not compared yet."""
        self.out_of_time = False
        """Whether ``max_time`` has ended the latest fit."""
        self.elapsed_before = 0.0
        self.started = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, which are the same on every rank."""
        counters = {name: getattr(self, name) for name in COUNTERS}
        return {
            **counters,
            "epoch_done": self.epoch_done,
            "elapsed": self.elapsed(),
            "accumulate": self.accumulate,
            "asked_accumulate": self.asked_accumulate,
            "batch_size": self.batch_size,
            "step_size": self.step_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the counters of :meth:`state_dict`, at the next epoch where theirs was complete."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.epoch_done = state["epoch_done"]
        self.elapsed_before = state["elapsed"]
        if self.epoch_done:
            self.next_epoch()

    def begin(self) -> None:
        """Begin a new fit: drop the data, and the pending resume of an earlier fit that may have failed."""
        self.data = None
        self.data_position = self.generators = None
        self.has_gradients = False

    def begin_at_epoch(self) -> None:
        """Begin a fit without a checkpoint where the last one ended, at the beginning of an epoch."""
        if self.epoch_done:
            self.next_epoch()
        self.batches_done = 0

    def resume(self, position: dict[str, Any] | None, generators: dict[str, Any] | None) -> None:
        """Let the next epoch loop continue from this rank's data position and generator states."""
        self.data_position = position
        self.generators = generators

    def count_step(self, result: StepResult) -> None:
        """Count the steps of an :meth:`.Strategy.optimizer_step`; nothing where none was due."""
        if result.steps:
            self.global_step += result.steps
            self.stepped = result.updated

    def next_epoch(self) -> None:
        """Count the running epoch as finished."""
        self.epoch += 1
        self.batches_done = 0
        self.epoch_done = False

    def elapsed(self) -> float:
        """Return the seconds of training, those of the runs that this one continues included."""
        return self.elapsed_before + (time.monotonic() - self.started if self.started else 0.0)

    def stop_clock(self) -> None:
        """Stop counting :meth:`elapsed` until ``started`` is set again."""
        self.elapsed_before, self.started = self.elapsed(), 0.0
