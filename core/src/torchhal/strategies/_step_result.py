"""Define the result of an optimizer step of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class StepResult:
    """Result of :meth:`.Strategy.optimizer_step`: the steps to count, and whether parameters changed.

    Attributes:
        steps: optimizer steps to count: 1; 0 where none was due yet; more where the state of other processes, which
            were ahead, was taken over.
        updated: whether parameters changed. False where the precision skipped the update, as after an overflow:
            schedulers wait then.

    .. versionadded:: 0.2
    """

    steps: int
    updated: bool

    def __bool__(self) -> bool:
        """Return :attr:`updated`."""
        return self.updated

    UPDATED: ClassVar[StepResult]
    """One step, which changed parameters."""
    SKIPPED: ClassVar[StepResult]
    """One step, whose update the precision skipped."""
    NOT_DUE: ClassVar[StepResult]
    """No step yet."""

    @classmethod
    def of(cls, value: object) -> StepResult:
        """Return ``value`` as a StepResult.

        Args:
            value: one, or what strategies returned before there was this class: True for an update, False for a skipped
                one, None where no step was due, an int for so many steps.

        Raises:
            TypeError: anything else, such as the loss that a closure returned.
        """
        if isinstance(value, cls):
            return value
        if value is None:
            return cls.NOT_DUE
        if not isinstance(value, int) or value < 0:
            raise TypeError(
                "optimizer_step of a strategy must return a StepResult, a bool, None, or how many steps it took (got "
                f"{value!r})"
            )
        return cls(max(1, value), bool(value))


StepResult.UPDATED = StepResult(1, True)
StepResult.SKIPPED = StepResult(1, False)
StepResult.NOT_DUE = StepResult(0, False)
