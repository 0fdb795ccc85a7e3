"""Read the curves that a run's loggers have written: ``metrics.csv``, and event files where tensorboard is there."""

from __future__ import annotations

import csv
import glob
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torchhal.report._fit_curves import Curve, FitStart, Point, Span, curves_of_fits, fit_starts
from torchhal.report._record import RECORD_FILE
from torchhal.report._regular_files import read_text, require_regular

CSV_FILE: Final = "metrics.csv"
_EVENTS: Final = "events.out.tfevents.*"


def read_curves(folder: str, fits: Sequence[Mapping[str, Any]] = ()) -> tuple[dict[str, Curve], list[str]]:
    """Return the curves of a run's folder by the metric's name, and what could not be read, as sentences.

    Args:
        folder: of the run.
        fits: those of its record, which tell the values of one from those of the next; empty without one.
    """
    problems: list[str] = []
    starts = fit_starts(fits)
    path = os.path.join(folder, CSV_FILE)
    logged: dict[str, list[Point]] = {}
    if os.path.exists(path):
        _read_csv(path, logged, problems)
    curves = _curves(logged, starts, [start.rows for start in starts], problems)
    if files := _event_files(folder, problems):
        events = _read_events(folder, len(files), problems)
        others = {name: points for name, points in events.items() if name not in logged}
        curves |= _curves(others, starts, [start.times for start in starts], problems)
    for curve in curves.values():
        curve.count_not_finite()
    return curves, problems


def _event_files(folder: str, problems: list[str]) -> list[str]:
    """Return TensorBoard's files; none where it would read one that never ends."""
    files = glob.glob(os.path.join(glob.escape(folder), _EVENTS))
    for path in files:
        try:
            require_regular(path)
        except OSError as error:
            problems.append(f"TensorBoard's files are not read, because of {path}: {error.strerror}")
            return []
    return files


def _curves(
    logged: Mapping[str, Sequence[Point]],
    starts: Sequence[FitStart],
    spans: Sequence[Span],
    problems: list[str],
) -> dict[str, Curve]:
    if starts:
        return curves_of_fits(logged, starts, spans)
    curves: dict[str, Curve] = {}
    repeated = []
    for name, points in logged.items():
        curve = curves[name] = Curve()
        for point in points:
            curve.add(point.step, point.value)
        if len(curve.steps) < len(points) or any(b.step < a.step for a, b in itertools.pairwise(points)):
            repeated.append(name)
    if repeated:
        problems.append(
            f"the steps of {', '.join(repeated)} repeat or go back, and no {RECORD_FILE} tells the fits apart: of "
            "several values of one step the latest is shown, and values that a resume has abandoned may be among them"
        )
    return curves


def _read_csv(path: str, logged: dict[str, list[Point]], problems: list[str]) -> None:
    bad = 0
    try:
        text = read_text(path, errors="replace").replace("\0", "")
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
        for number, row in enumerate(rows):
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
                    logged.setdefault(name, []).append(Point(number, step, value))
    except csv.Error as error:
        problems.append(f"{path} is damaged after row {rows.line_num}: {error}")
    if bad:
        problems.append(f"{path} has {bad} row(s) or value(s) that can't be read, and are left out")
    if cut:
        problems.append(f"{path} ends within a row: it is being written, or the run was killed while it was")


def _read_events(folder: str, files: int, problems: list[str]) -> dict[str, list[Point]]:
    logged: dict[str, list[Point]] = {}
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        problems.append(
            f"{files} event file(s) of TensorBoard are not read: tensorboard is not installed "
            "(pip install 'torchhal[tensorboard]')"
        )
        return logged
    try:
        # purged, values of an earlier fit would be gone without a word
        events = EventAccumulator(folder, size_guidance={"scalars": 0}, purge_orphaned_data=False)
        events.Reload()
        for name in events.Tags()["scalars"]:
            if name != "epoch":
                logged[name] = [Point(one.wall_time, int(one.step), float(one.value)) for one in events.Scalars(name)]
    except Exception as error:  # of another library, over a file that may be damaged
        problems.append(f"the event files of TensorBoard in {folder} can't be read: {type(error).__name__}: {error}")
    return logged
