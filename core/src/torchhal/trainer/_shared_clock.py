"""Measure a time interval that ends at the same step on all ranks."""

from __future__ import annotations

import time
from typing import Any


class SharedClock:
    """Timer by rank 0's clock, which also decides at which step all ranks check it again.

    Each check is a collective, which is too expensive at every step. Rank 0 measures how long a step takes and sets the
    next check half of the remaining time later, which makes a handful of checks per interval.

    Args:
        seconds: the interval.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._first_step = 0
        self._began = 0.0
        self.next_look = 0
        """The step from which on :meth:`is_due` is to be called."""

    def start(self, step: int) -> None:
        """Start the interval now, after ``step``."""
        self._began = time.monotonic()
        self._first_step = step
        self.next_look = step + 1

    def is_due(self, step: int, strategy: Any) -> bool:
        """Return whether the interval is over, the same on every rank. Every rank must call at the same step."""
        elapsed = time.monotonic() - self._began
        due, skip = elapsed >= self._seconds, 1
        if strategy.world_size > 1:
            per_step = elapsed / max(1, step - self._first_step)
            skip = max(1, int((self._seconds - elapsed) / (2 * per_step))) if per_step else 1
            due, skip = strategy.broadcast((due, skip))
        self.next_look = step + skip
        return due
