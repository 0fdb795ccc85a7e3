"""Write progress as whole lines, for a log file, where a bar that draws over itself can't be read."""

from __future__ import annotations

import time
from typing import Any


class ProgressLines:
    """Stands in for a bar of tqdm where its output is no terminal: each :meth:`refresh` writes one line.

    Args:
        desc: the title.
        total: batches; None if unknown.
        leave: whether a line is written at the end, however short it was.
        file: a text stream.
        **options: those of tqdm that make no difference to lines.
    """

    def __init__(self, *, desc: str, total: int | None, leave: bool, file: Any, **options: Any) -> None:
        self.leave = leave
        self._title = desc
        self._file = file
        self._values = ""
        self._written = ""
        self.reset(total)

    def reset(self, total: int | None = None) -> None:
        """Begin anew, from now."""
        self.total = total
        self.n = self.initial = self.last_print_n = 0
        self._began = time.monotonic()

    def set_description_str(self, desc: str, refresh: bool = True) -> None:
        """Set the title."""
        self._title = desc

    def set_postfix_str(self, values: str, refresh: bool = True) -> None:
        """Set the values at the end of the line."""
        self._values = values

    def refresh(self) -> None:
        """Write a line, unless it is the one that was written last."""
        position = f"{self.n}it" if not self.total else f"{100 * self.n / self.total:3.0f}% {self.n}/{self.total}"
        if (line := f"{self._title}: {position}{self._values}") == self._written:
            return
        self._written = line
        parts = [f"{self._title}: {position}"]
        took, done = time.monotonic() - self._began, self.n - self.initial
        if done > 0 and took > 0:
            parts.append(f"{done / took:.3g} batches/s")
            if self.total and self.n < self.total:
                parts.append(f"{_clock((self.total - self.n) * took / done)} left")
            else:
                parts.append(f"in {_clock(took)}")
        if self._values:
            parts.append(self._values)
        self._file.write(f"{', '.join(parts)}\n")
        self._file.flush()

    def close(self) -> None:
        """Do nothing: the last line stands."""

    @classmethod
    def write(cls, text: str, end: str = "\n", file: Any = None) -> None:
        """Write ``text``; no bar is in its way."""
        file.write(text + end)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
