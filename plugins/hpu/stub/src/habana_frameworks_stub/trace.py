"""What the stub has noted, for tests to ask."""

from __future__ import annotations

from torchhal_simulator._counters import counters

_marks: list[int] = []
_seen = 0
compiled: list[str] = []
"""The names of the graphs' first operators, one for each graph that ``hpu_backend`` was given."""


def mark() -> None:
    """Note a step mark. Called by ``mark_step``."""
    global _seen
    now = counters("hpu").operators
    _marks.append(now - _seen)
    _seen = now


def marks() -> list[int]:
    """Of each step mark so far: how many operators had run since the one before."""
    return list(_marks)


def unmarked() -> int:
    """Operators since the last step mark: in lazy mode they would still wait."""
    return counters("hpu").operators - _seen
