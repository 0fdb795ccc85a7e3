"""A time interval that several ranks notice at the same step."""

from __future__ import annotations

import time
from typing import Any


class SharedClock:
    """Rank 0's clock, asked rarely: it also says at which step all ranks ask again.

    Asking is a collective, so one per step would be a tax. Rank 0 knows how long a step takes and lets the others
    ask again half of the remaining time later, which comes to a handful of questions per interval.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._first_step = 0
        self._began = 0.0
        self.next_look = 0
        """The step from which on :meth:`is_due` is to be asked."""

    def start(self, step: int) -> None:
        """The interval begins now, after ``step``."""
        self._began = time.monotonic()
        self._first_step = step
        self.next_look = step + 1

    def is_due(self, step: int, strategy: Any) -> bool:
        """Whether the interval is over; the same on every rank, which must all ask at this step."""
        elapsed = time.monotonic() - self._began
        due, skip = elapsed >= self._seconds, 1
        if strategy.world_size > 1:
            per_step = elapsed / max(1, step - self._first_step)
            skip = max(1, int((self._seconds - elapsed) / (2 * per_step))) if per_step else 1
            due, skip = strategy.broadcast((due, skip))
        self.next_look = step + skip
        return due
