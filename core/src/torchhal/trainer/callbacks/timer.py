"""Measure the time that training and evaluations take, and end training by it, with Timer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchhal._arguments import check_bool, check_duration
from torchhal.suggestions import did_you_mean, one_of
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._monitor import check_number
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer

STAGES = ("train", "sanity_check", "validate", "test", "predict")


class Timer(Callback):
    """Callback that measures the time of each stage, and ends training when ``duration`` is used up.

    A resumed run goes on counting. Training includes the validations in between. The ranks agree on the step at which
    they stop, as for ``Trainer(max_time=...)``, which is the same limit without the readings; ``min_epochs`` and
    ``min_steps`` are reached first.

    Args:
        duration: the longest training: ``"DD:HH:MM:SS"``, a timedelta or its keywords as a dict; None only measures.
        interval: ``"step"``: stop after the step that is running then; ``"epoch"``: at the end of its epoch.
        verbose: print when the time is used up.

    Raises:
        ConfigurationError, ValueError: an argument outside its domain.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        limit = check_duration("duration", duration)
        self._duration = None if limit is None else limit.total_seconds()
        if interval not in ("step", "epoch"):
            raise ValueError(f"'interval' must be 'step' or 'epoch' (got {interval!r})")
        self._interval = str(interval)
        self._verbose = check_bool("verbose", verbose)
        self._reset_state()

    def _reset_state(self) -> None:
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._before: dict[str, float] = {}
        """Seconds of each stage before its latest start."""
        self.stop_reason = ""
        """The reason for which it has stopped the latest fit, or ""."""

    # -- readings ------------------------------------------------------------------------------------------------

    def start_time(self, stage: str = "train") -> float | None:
        """Return when the latest run of a stage began, by :func:`time.monotonic`; None before the first.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"``, ``"predict"`` or ``"sanity_check"``.
        """
        return self._start.get(_check_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return when the latest run of a stage ended, by :func:`time.monotonic`; None before that."""
        return self._end.get(_check_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds that all runs of a stage have taken, also before a restart."""
        start, end = self.start_time(stage), self.end_time(stage)
        latest = 0.0 if start is None else (time.monotonic() if end is None else end) - start
        return self._before.get(stage, 0.0) + latest

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds of ``duration`` that a stage has left; None without a ``duration``."""
        elapsed = self.time_elapsed(stage)
        return None if self._duration is None else self._duration - elapsed

    def _begin(self, stage: str) -> None:
        self._before[stage] = self.time_elapsed(stage)
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)

    def _stop(self, stage: str) -> None:
        if stage in self._start:
            self._end.setdefault(stage, time.monotonic())

    # -- the limit -----------------------------------------------------------------------------------------------

    def _is_used_up(self) -> bool:
        remaining = self.time_remaining()
        return remaining is not None and remaining <= 0

    def _check(self, trainer: Trainer) -> None:
        # On this rank alone: the loop lets all ranks agree on the step at which they stop.
        if not self.stop_reason and self._is_used_up():
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            self.stop_reason = f"its time is used up, training took {elapsed}"
            trainer.should_stop = True
            if self._verbose:
                trainer.print(f"{type(self).__name__}: {self.stop_reason}")

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        """Leave nothing to train where the runs that this one continues have used up the time."""
        used_up = self._is_used_up()
        if self._duration is not None and trainer.world_size > 1:  # the ranks' clocks differ
            used_up = trainer.strategy.reduce_boolean_decision(used_up, all=False)
        if used_up:
            self.stop_reason = f"its time is used up, training took {timedelta(seconds=int(self.time_elapsed()))}"
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if self._interval == "epoch":
            self._check(trainer)

    # -- stages --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage == "fit":
            self.stop_reason = ""

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        for each in STAGES:  # an error may have cut some short
            self._stop(each)

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._begin("train")

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self._stop("train")

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        self._begin("sanity_check" if trainer.sanity_checking else "validate")

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self._stop("sanity_check" if trainer.sanity_checking else "validate")

    def on_test_start(self, trainer: Trainer, module: Any) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, module: Any) -> None:
        self._stop("test")

    def on_predict_start(self, trainer: Trainer, module: Any) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: Trainer, module: Any) -> None:
        self._stop("predict")

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        elapsed: Mapping[str, Any] = state_dict["time_elapsed"]
        before = {str(stage): float(check_number(f"time_elapsed of {stage}", elapsed[stage])) for stage in elapsed}
        self._before, self._start, self._end = before, {}, {}


def _check_stage(stage: str) -> str:
    if stage not in STAGES:
        raise ValueError(f"'stage' must be {one_of(STAGES)} (got {stage!r}){did_you_mean(str(stage), STAGES)}")
    return stage
