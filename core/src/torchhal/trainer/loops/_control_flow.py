"""Define the exceptions by which a loop ends, or goes on elsewhere, outside of its own course."""

from __future__ import annotations


class StopOnSignal(Exception):
    """All ranks stop here, at the same step boundary, on this signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class DataPositionChanged(Exception):
    """A strategy has taken over the counters of others, who are elsewhere in the data: the loop goes on from there.

    Raised by the callable of ``Strategy.step_function("training_step")`` before it does anything with its batch, which
    is left out.
    """
