"""Read the curves that a run's loggers have written: ``metrics.csv``, and event files where tensorboard is there."""

from __future__ import annotations

import csv
import glob
import math
import os
from dataclasses import dataclass, field
from typing import Final

CSV_FILE: Final = "metrics.csv"
_EVENTS: Final = "events.out.tfevents.*"


@dataclass
class Curve:
    """The values of one metric by step, in the order in which they were logged.

    A run that continued from a checkpoint has logged some steps twice; the later values count.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    not_finite: int = 0
    """Values that are NaN or infinite, which a plot leaves out."""

    def add(self, step: int, value: float) -> None:
        """Add a value; those of later steps, which a continued run repeats, are dropped."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)

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


def read_curves(folder: str) -> tuple[dict[str, Curve], list[str]]:
    """Return the curves of a run's folder by the metric's name, and what could not be read, as sentences."""
    curves: dict[str, Curve] = {}
    problems: list[str] = []
    path = os.path.join(folder, CSV_FILE)
    if os.path.exists(path):
        _read_csv(path, curves, problems)
    if events := sorted(glob.glob(os.path.join(glob.escape(folder), _EVENTS))):
        _read_events(folder, len(events), curves, problems)
    for curve in curves.values():
        curve.count_not_finite()
    return curves, problems


def _read_csv(path: str, curves: dict[str, Curve], problems: list[str]) -> None:
    bad = 0
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            text = file.read().replace("\0", "")
    except OSError as error:
        problems.append(f"{path} can't be read: {error.strerror}")
        return
    whole = text.rfind("\n") + 1
    cut = whole < len(text)  # a row that is being written, or that a kill has cut
    rows = csv.reader(text[:whole].splitlines())
    header = next(rows, [])
    if "step" not in header:
        if header or cut:
            problems.append(f"{path} has no column 'step', so it is no file of a CSVLogger")
        return
    step = -1
    try:
        for row in rows:
            if len(row) != len(header):
                bad += 1
                continue
            cells = dict(zip(header, row, strict=True))
            try:
                step = int(float(cells.pop("step") or step + 1))
            except (ValueError, OverflowError):
                bad += 1
                continue
            for name, cell in cells.items():
                if cell == "" or name == "epoch":
                    continue
                try:
                    value = float(cell)
                except ValueError:
                    bad += 1
                else:
                    curves.setdefault(name, Curve()).add(step, value)
    except csv.Error as error:
        problems.append(f"{path} is damaged after row {rows.line_num}: {error}")
    if bad:
        problems.append(f"{path} has {bad} row(s) or value(s) that can't be read, and are left out")
    if cut:
        problems.append(f"{path} ends within a row: it is being written, or the run was killed while it was")


def _read_events(folder: str, files: int, curves: dict[str, Curve], problems: list[str]) -> None:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        problems.append(
            f"{files} event file(s) of TensorBoard are not read: tensorboard is not installed "
            "(pip install 'torchhal[tensorboard]')"
        )
        return
    try:
        events = EventAccumulator(folder, size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            if name in curves or name == "epoch":
                continue
            curve = curves[name] = Curve()
            for event in events.Scalars(name):
                curve.add(int(event.step), float(event.value))
    except Exception as error:  # of another library, over a file that may be damaged
        problems.append(f"the event files of TensorBoard in {folder} can't be read: {type(error).__name__}: {error}")
