"""Join the logged values of a folder's fits into curves: a resume replaces what it repeats, another fit has its own.

``run.json`` lists the fits. A fit that continues from a checkpoint takes over the curves of those before it, up to the
step of the checkpoint. A fit that begins anew has curves of its own. A value logged after a fit's end, or whose
step goes back within a fit, is that of an evaluation, such as ``trainer.validate`` with another checkpoint.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

EVALUATION: Final = "evaluation"
UNRECORDED: Final = "earlier"


@dataclass
class Curve:
    """The values of one metric by step; of several values of one step the latest counts."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    not_finite: int = 0
    """Values that are NaN or infinite, which a plot leaves out."""

    def add(self, step: int, value: float) -> None:
        """Add a value, or replace that of the same step."""
        at = bisect.bisect_left(self.steps, step)
        if at < len(self.steps) and self.steps[at] == step:
            self.values[at] = value
        else:
            self.steps.insert(at, step)
            self.values.insert(at, value)

    def drop_after(self, step: int) -> None:
        """Drop the values of later steps, which a resumed fit has abandoned."""
        at = bisect.bisect_right(self.steps, step)
        del self.steps[at:], self.values[at:]

    def count_not_finite(self) -> None:
        """Count what a plot can't show."""
        self.not_finite = sum(not math.isfinite(value) for value in self.values)

    @property
    def last(self) -> float:
        """The latest value."""
        return self.values[-1]

    def extremes(self) -> tuple[tuple[float, int], tuple[float, int]] | None:
        """Return the least and the greatest finite value, each with its step; None without one."""
        pairs = [pair for pair in zip(self.values, self.steps, strict=True) if math.isfinite(pair[0])]
        return (min(pairs), max(pairs)) if pairs else None


class Point(NamedTuple):
    """A logged value.

    Attributes:
        position: the number of its row in ``metrics.csv``, or the time at which an event was written.
        step: that it was logged with.
        value: of the metric.
    """

    position: float
    step: int
    value: float


Span = tuple[float | None, float | None]
"""Between which positions a fit has logged."""


class FitStart(NamedTuple):
    """Where a recorded fit began.

    Attributes:
        label: names the fit where several have curves of their own.
        first_step: the Trainer's step when it began.
        last_step: the step it reached; None where no end was recorded.
        resumes: whether it continued the fits before it.
        rows: that ``metrics.csv`` had when it began and when it ended; None where that isn't recorded.
        times: when it began and when it ended, in seconds since the epoch.
    """

    label: str
    first_step: int
    last_step: int | None
    resumes: bool
    rows: Span
    times: Span


def fit_starts(fits: Iterable[Mapping[str, Any]]) -> list[FitStart]:
    """Return where the fits of a record began, without those that ended before they were set up."""
    starts: list[FitStart] = []
    for number, fit in enumerate(fits, 1):
        first, last = _number(fit.get("first_step")), _number(fit.get("step"))
        if first is None:
            continue
        # A Trainer that fits again counts on from the step that it has reached.
        counts_on = first > 0 and bool(starts) and starts[-1].last_step == first
        starts.append(
            FitStart(
                label=f"fit {number}",
                first_step=int(first),
                last_step=None if last is None else int(last),
                resumes=bool(fit.get("continued_from")) or counts_on,
                rows=(_number(fit.get("first_row")), _number(fit.get("end_row"))),
                times=(_number(fit.get("began")), _number(fit.get("ended"))),
            )
        )
    return starts


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def curves_of_fits(
    logged: Mapping[str, Sequence[Point]], starts: Sequence[FitStart], spans: Sequence[Span]
) -> dict[str, Curve]:
    """Return the curves by name; those that aren't of the latest fit have a word in brackets after the metric's name.

    Args:
        logged: the values of each metric in the order in which they were logged.
        starts: at least one fit.
        spans: of each of them; where a beginning is unknown, the steps tell it.
    """
    begins = [begin for begin, _ in spans if begin is not None]
    ends = [math.inf if end is None else end for _, end in spans]
    if len(begins) < len(starts):
        begins = []
    elif any(point.position < begins[0] for points in logged.values() for point in points):
        starts = [FitStart(UNRECORDED, 0, None, False, (None, None), (None, None)), *starts]
        begins, ends = [-math.inf, *begins], [math.inf, *ends]
    split = {name: _Split(points, starts, begins, ends) for name, points in logged.items()}
    reached = max((one.at for one in split.values()), default=0)
    latest = next(start.label for start in reversed(starts[: reached + 1]) if not start.resumes or start is starts[0])
    curves: dict[str, Curve] = {}
    for name, one in split.items():
        if begins:
            one.begin(reached)  # what a resume abandons, also where it has not logged this metric yet
        for label, curve in one.curves.items():
            if curve.steps:
                # "test_loss" of a checkpoint is of no fit, so no curve of a fit needs to be told from it.
                plain = label == latest or (label == EVALUATION and not any(c.steps for c in one.of_fits()))
                curves[name if plain else f"{name} ({label})"] = curve
    return curves


class _Split:
    """The values of one metric by fit, and those of evaluations."""

    def __init__(
        self, points: Sequence[Point], starts: Sequence[FitStart], begins: Sequence[float], ends: Sequence[float]
    ) -> None:
        self._starts = starts
        self.at = 0
        """The fit that logged last."""
        self._curve = Curve()
        self.curves = {starts[0].label: self._curve, EVALUATION: Curve()}
        for point in points:
            at = bisect.bisect_right(begins, point.position) - 1 if begins else self._by_step(point.step)
            is_of_fit = not begins or point.position < ends[at]
            if is_of_fit:
                self.begin(at)
                steps = self._curve.steps
                is_of_fit = point.step >= (steps[-1] if steps else starts[self.at].first_step)
            (self._curve if is_of_fit else self.curves[EVALUATION]).add(point.step, point.value)

    def begin(self, at: int) -> None:
        """Go on to a later fit."""
        while self.at < at:
            self.at += 1
            start = self._starts[self.at]
            if start.resumes:
                self._curve.drop_after(start.first_step)
            else:
                self._curve = self.curves.setdefault(start.label, Curve())

    def of_fits(self) -> Iterable[Curve]:
        """Return the curves that aren't of evaluations."""
        return [curve for label, curve in self.curves.items() if label != EVALUATION]

    def _by_step(self, step: int) -> int:
        """Return the fit of the next value: a later one where the step doesn't grow, or is beyond this fit's end."""
        steps, last = self._curve.steps, self._starts[self.at].last_step
        if (steps and step <= steps[-1]) or (last is not None and step > last):
            for later in range(self.at + 1, len(self._starts)):
                if self._starts[later].first_step <= step:
                    return later
        return self.at
