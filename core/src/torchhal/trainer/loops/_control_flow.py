"""Define the exceptions that end a loop, or move it to another position."""

from __future__ import annotations


class StopOnSignal(Exception):
    """All ranks stop here, at the same step boundary, on this signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class DataPositionChanged(Exception):
    """A strategy has loaded the counters of other ranks at another position: the loop continues from there.

    Raised by the callable of ``Strategy.step_function("training_step")`` before it does anything with its batch, which
    is left out.
    """
