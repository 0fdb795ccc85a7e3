"""Decide when a fit ends: by its limits, a request of the program, or a signal."""

from __future__ import annotations

import time

from torchhal.trainer._progress import FitProgress
from torchhal.trainer._run_part import RunPart
from torchhal.trainer.callbacks import Callback
from torchhal.trainer.loops._control_flow import StopOnSignal
from torchhal.trainer.run_state import RunState

# Reasons for a stop that ranks agree on as they do on a signal; no signal has a negative number.
STOP_ASKED = -1
OUT_OF_TIME = -2


class StopConditions(RunPart[RunState]):
    """Conditions on which a fit ends; ranks agree on those that may hold on only some of them."""

    def __init__(self, run: RunState) -> None:
        super().__init__(run)
        self.progress: FitProgress = run.progress
        self.deadline: float | None = None
        """The time, in seconds of :func:`time.monotonic`, at which ``max_time`` is used up; None without a limit."""
        self._wish: int | None = None

    def begin(self) -> None:
        """Begin another fit."""
        self._wish = None

    def set_deadline(self) -> None:
        """Set the time at which ``max_time`` is used up, of which earlier fits of the run have used some."""
        limit = self.run.max_time
        self.deadline = (
            None if limit is None else self.progress.started + limit.total_seconds() - self.progress.elapsed_before
        )

    def _late(self) -> bool:
        """Return whether the deadline has passed on this rank."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def stop_if_late(self) -> None:
        """Request a stop if the deadline has passed."""
        if not self.run.should_stop and self._late():
            self.run.should_stop = self.progress.out_of_time = True

    def _minimum_reached(self) -> bool:
        run = self.run
        return self.progress.epoch >= (run.min_epochs or 0) and self.progress.global_step >= (run.min_steps or 0)

    def _steps_reached(self) -> bool:
        return self.run.max_steps != -1 and self.progress.global_step >= self.run.max_steps

    def is_done(self) -> bool:
        """Return whether training is over; the same on every rank."""
        run = self.run
        if self._steps_reached():
            return True
        if run.max_epochs is not None and run.max_epochs != -1 and self.progress.epoch >= run.max_epochs:
            return True
        return run.should_stop and self._minimum_reached()

    def stops_at_boundary(self, alone: bool) -> bool:
        """Return whether every rank stops at this step boundary, at the request of some rank.

        Args:
            alone: whether the world has one rank.

        Raises:
            StopOnSignal: all ranks stop here on a signal.
        """
        run = self.run
        watch = run.strategy.watch
        if alone:
            if watch.stop_requested and (signum := watch.agree_on_stop_step()) is not None:
                raise StopOnSignal(signum)
            self.stop_if_late()
            return run.should_stop and self._minimum_reached()
        # only one rank's clock or callback may request it: agree as on a signal, without a collective per step
        wish = STOP_ASKED if run.should_stop else OUT_OF_TIME if self._late() else None
        if wish is not None and wish != self._wish and self._minimum_reached():
            self._wish = wish  # only once, so that a later signal is not lost
            watch.request_stop(wish)
        if watch.stop_requested and (signum := watch.agree_on_stop_step()) is not None:
            if signum > 0:
                raise StopOnSignal(signum)
            run.should_stop = True
            self.progress.out_of_time = signum == OUT_OF_TIME
            return self._minimum_reached()
        return False

    def reason(self) -> str:
        """Return the reason that ended the latest fit, or that leaves nothing to do for the next one."""
        run = self.run
        if self.progress.data is not None and self.progress.data.length == 0:
            return "its limit allows no training batch"
        if self._steps_reached():
            return f"max_steps={run.max_steps} is reached at optimizer step {self.progress.global_step}"
        if self.progress.out_of_time:
            return f"max_time is used up ({run.max_time})"
        if run.should_stop:
            own = [callback for callback in run.callbacks if isinstance(callback, Callback)]
            said = [f"{type(each).__name__}: {reason}" for each in own if (reason := getattr(each, "stop_reason", ""))]
            return said[0] if said else "trainer.should_stop is set"
        return f"max_epochs={run.max_epochs} is reached after {self.progress.epoch} epoch(s)"
