"""Write progress as whole lines, for a log file, where a bar that draws over itself can't be read."""

from __future__ import annotations

import time
from typing import Any


class MeasuredBatches:
    """The batches done of a number that may be unknown, and their speed; the state of a bar.

    Args:
        desc: the title.
        total: batches; None if unknown.
        leave: whether something of it stays at the end, however short it was.
    """

    def __init__(self, *, desc: str, total: int | None, leave: bool) -> None:
        self.leave = leave
        self.title = desc
        self.values = ""
        self.reset(total)

    def reset(self, total: int | None = None) -> None:
        """Begin anew, from now."""
        self.total = total
        self.n = self.initial = self.last_print_n = 0
        self._began = time.monotonic()

    def set_description_str(self, desc: str, refresh: bool = True) -> None:
        """Set the title."""
        self.title = desc

    def set_postfix_str(self, values: str, refresh: bool = True) -> None:
        """Set the values of metrics."""
        self.values = values

    def speed(self) -> str:
        """Return the batches per second since the beginning; empty before the first."""
        took, done = self._seconds(), self.n - self.initial
        if done <= 0 or took <= 0:
            return ""
        rate = done / took
        return f"{rate:.0f} batches/s" if rate >= 100 else f"{rate:.3g} batches/s"

    def elapsed(self) -> str:
        """Return the time since the beginning, such as ``"01:30"``."""
        return _clock(self._seconds())

    def remaining(self) -> str:
        """Return the time that the rest will take at this speed; empty if it is unknown or nothing is left."""
        took, done = self._seconds(), self.n - self.initial
        if not self.total or self.n >= self.total or done <= 0:
            return ""
        return _clock((self.total - self.n) * took / done)

    def _seconds(self) -> float:
        return time.monotonic() - self._began


class ProgressLines(MeasuredBatches):
    """Stands in for a bar where its output is no terminal: each :meth:`refresh` writes one line.

    Args:
        desc: the title.
        total: batches; None if unknown.
        leave: whether a line is written at the end, however short it was.
        file: a text stream.
    """

    def __init__(self, *, desc: str, total: int | None, leave: bool, file: Any) -> None:
        super().__init__(desc=desc, total=total, leave=leave)
        self._file = file
        self._written = ""

    def refresh(self) -> None:
        """Write a line, unless it is the one that was written last."""
        position = f"{self.n}it" if not self.total else f"{100 * self.n / self.total:3.0f}% {self.n}/{self.total}"
        if (line := f"{self.title}: {position}{self.values}") == self._written:
            return
        self._written = line
        parts = [f"{self.title}: {position}"]
        if speed := self.speed():
            remaining = self.remaining()
            parts += [speed, f"{remaining} left" if remaining else f"in {self.elapsed()}"]
        if self.values:
            parts.append(self.values)
        self._file.write(f"{', '.join(parts)}\n")
        self._file.flush()

    def close(self) -> None:
        """Do nothing: the last line stands."""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
