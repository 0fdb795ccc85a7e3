"""Decide after which training batches of a fit a validation runs."""

from __future__ import annotations

from datetime import timedelta

from torchhal.errors import ConfigurationError
from torchhal.trainer._progress import FitProgress
from torchhal.trainer._run_part import RunPart
from torchhal.trainer._shared_clock import SharedClock
from torchhal.trainer.data._loaders import share_of
from torchhal.trainer.run_state import RunState

# Of a validation interval, which else is a number of batches.
NEVER = 0
AFTER_LAST_BATCH = -1
BY_TIME = -2


class ValidationSchedule(RunPart[RunState]):
    """The batches of a fit after which it validates, by ``val_check_interval`` and ``check_val_every_n_epoch``."""

    def __init__(self, run: RunState) -> None:
        super().__init__(run)
        self.progress: FitProgress = run.progress
        self._clock: SharedClock | None = None
        self._clock_of: timedelta | None = None

    def interval(self, length: int | None) -> int:
        """Return the batches between two validations in the running epoch.

        Args:
            length: batches of the epoch; None for a loader without a length.

        Returns:
            A number of batches; NEVER, AFTER_LAST_BATCH, or BY_TIME where :meth:`is_time` says.

        Raises:
            ConfigurationError: ``val_check_interval`` doesn't fit ``length``.
        """
        run = self.run
        if not run.sources.validation_data:
            return NEVER
        every = run.check_val_every_n_epoch
        due = every is None or (self.progress.epoch + 1) % every == 0
        interval = run.val_check_interval
        if isinstance(interval, timedelta):
            return BY_TIME if due else NEVER
        if isinstance(interval, int):
            if every is not None and length and interval > length:
                raise ConfigurationError(
                    f"'val_check_interval' must be at most the {length} training batches of an epoch (got {interval}); "
                    "to count across epochs, set check_val_every_n_epoch=None"
                )
            return interval if due else NEVER
        if length is None:
            if interval != 1.0:
                raise ConfigurationError(
                    f"'val_check_interval' is a share of the epoch ({interval}), but the training loader doesn't know "
                    "its length: use a number of batches"
                )
            return AFTER_LAST_BATCH if due else NEVER
        return max(1, share_of(length, interval)) if due else NEVER

    def is_due(self, length: int | None) -> bool:
        """Return whether a validation follows the last batch, of a run that was stopped there and continues."""
        every = self.interval(length)
        if every <= 0 or self.progress.validated_at == self.progress.total_batches:
            return False
        count = self.progress.total_batches if self.run.check_val_every_n_epoch is None else self.progress.batches_done
        return count % every == 0

    def start_clock(self) -> None:
        """Begin an interval of time now. Called on every rank after the same batch."""
        interval = self.run.val_check_interval
        if isinstance(interval, timedelta):
            self._clock, self._clock_of = SharedClock(interval.total_seconds()), interval
            self._clock.start(self.progress.total_batches)

    def is_time(self) -> bool:
        """Return whether the interval of time is over, the same on every rank; asked after each batch."""
        if self._clock is None or self._clock_of != self.run.val_check_interval:
            self.start_clock()  # a hook has set it
        clock, batch = self._clock, self.progress.total_batches
        assert clock is not None
        return batch >= clock.next_look and clock.is_due(batch, self.run.strategy)
