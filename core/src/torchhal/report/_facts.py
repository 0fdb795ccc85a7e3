"""Gather the tables of a report from the runs, for the page and for the terminal alike."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from torchhal.report._run_folder import RunFolder, as_time

Rows = list[tuple[str, ...]]
"""Cells of a table, without its head."""

DEVICE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: Any) -> str:
    """Format a number with at most six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def size(count: Any) -> str:
    """Format a number of bytes, as ``"1.5 GiB"``; empty for what is none."""
    if isinstance(count, bool) or not isinstance(count, int | float) or not math.isfinite(count):
        return ""
    scaled, unit = float(count), 0
    while abs(scaled) >= 1024 and unit + 1 < len(DEVICE_UNITS):
        scaled, unit = scaled / 1024, unit + 1
    return f"{scaled:.1f} {DEVICE_UNITS[unit]}" if unit else f"{int(scaled)} B"


def duration(seconds: Any) -> str:
    """Format seconds, as ``"1 h 02 min"`` or ``"3.25 s"``; empty for what is no number."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60):02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def as_cell(value: Any) -> str:
    """Return a value as text, containers as JSON."""
    if isinstance(value, dict | list):
        return json.dumps(value, default=str)
    return number(value)


def overview(run: RunFolder) -> Rows:
    """Return what the run is, how it stands and how far it has come."""
    fit = run.latest
    rows: Rows = [("status", run.status()), ("folder", run.path)]
    if fit.get("model"):
        count = fit.get("parameters")
        rows.append(("model", f"{fit['model']}, {count:,} parameters" if isinstance(count, int) else str(fit["model"])))
    for name in ("began", "ended"):
        if text := as_time(fit.get(name)):
            rows.append((name, text))
    seconds = run.part("seconds")
    if text := duration(seconds.get("all")):
        rows.append(("took", text))
    if "step" in fit:
        rows.append(("reached", f"step {fit['step']}, epoch {fit.get('epoch', '?')}"))
    speed = _steps_per_second(fit, seconds)
    if speed is not None:
        rows.append(("speed", f"{speed:.4g} optimizer steps a second of training"))
    if fit.get("continued_from"):
        rows.append(("continued from", f"{fit['continued_from']} at step {fit.get('first_step', '?')}"))
    if isinstance(command := fit.get("command"), list):
        rows.append(("command", " ".join(map(str, command))))
    return rows


def _steps_per_second(fit: dict[str, Any], seconds: dict[str, Any]) -> float | None:
    try:
        steps = int(fit["step"]) - int(fit.get("first_step") or 0)
        took = float(seconds["training"])
    except (KeyError, TypeError, ValueError):
        return None
    return steps / took if steps > 0 and took > 0 else None


def metrics(run: RunFolder) -> Rows:
    """Return for each metric: name, latest value, least and greatest with their steps, count and those not finite."""
    rows: Rows = []
    for name, curve in run.curves.items():
        found = curve.extremes()
        least, greatest = ("", "") if found is None else (f"{value:.6g} at {step}" for value, step in found)
        odd = str(curve.not_finite) if curve.not_finite else ""
        rows.append((name, f"{curve.last:.6g}", least, greatest, str(len(curve.values)), odd))
    return rows


def plan(run: RunFolder) -> Rows:
    """Return what was chosen for the run, with the reasons."""
    rows: Rows = []
    for what, row in run.part("plan").items():
        if isinstance(row, dict):
            rows.append((str(what), str(row.get("choice", "")), str(row.get("reason", ""))))
    notes = run.latest.get("notes")
    rows += [("note", str(note), "") for note in notes] if isinstance(notes, list) else []
    return rows


def phases(run: RunFolder) -> list[tuple[str, float]]:
    """Return the seconds of each phase of the latest fit; the profiler's actions where there was one."""
    profile = run.part("profile")
    try:
        if profile:
            found = {"the loop itself" if name == "fit" else name: float(row[0]) for name, row in profile.items()}
        else:
            found = {name: float(value) for name, value in run.part("seconds").items() if name != "all"}
    except (TypeError, ValueError, IndexError, KeyError):
        return []
    return sorted(((name, value) for name, value in found.items() if value >= 0), key=lambda row: -row[1])


def memory(run: RunFolder) -> Rows:
    """Return the peak memory of each rank: rank, device, of the device, of the process."""
    found = run.latest.get("memory")
    rows: Rows = []
    for row in found if isinstance(found, list) else []:
        if isinstance(row, dict):
            peaks = size(row.get("device_peak")), size(row.get("host_peak"))
            rows.append((str(row.get("rank", "?")), str(row.get("device", "")), *peaks))
    return rows


def checkpoints(run: RunFolder) -> Rows:
    """Return the files that are there, with size, time, score, and what the run says of them."""
    said: dict[str, list[str]] = {}
    scores: dict[str, str] = {}
    recorded = run.latest.get("checkpoints")
    for row in recorded if isinstance(recorded, list) else []:
        if not isinstance(row, dict):
            continue
        monitor = row.get("monitor")
        for word, key in (("best" if monitor else "newest", "best"), ("last", "last"), ("interrupted", "interrupted")):
            if isinstance(path := row.get(key), str):
                said.setdefault(_name(path), []).append(word)
        for path, score in (row.get("scores") or {}).items() if isinstance(row.get("scores"), dict) else ():
            scores[_name(path)] = f"{monitor} {number(score)}"
    return [
        (
            each["name"],
            size(each["bytes"]),
            as_time(each["written"]),
            scores.get(each["name"], ""),
            ", ".join(dict.fromkeys(said.get(each["name"], []))),
        )
        for each in run.checkpoints
    ]


def _name(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2]


def history(run: RunFolder) -> Rows:
    """Return each fit of the run's folder: number, began, ended, from step, to step, how it ended."""
    rows: Rows = []
    for number, fit in enumerate(run.fits, 1):
        source = fit.get("continued_from")
        first = str(fit.get("first_step", "")) + (f" of {_name(str(source))}" if source else "")
        times = as_time(fit.get("began")), as_time(fit.get("ended"))
        rows.append((f"fit {number}", *times, first, str(fit.get("step", "")), run.status(fit)))
    return rows


def named(run: RunFolder, what: str) -> dict[str, str]:
    """Return hyperparameters, settings, versions or choices of the plan as text by name."""
    if what == "hyperparameters":
        found = run.hparams
    elif what == "plan":
        found = {name: row.get("choice", "") for name, row in run.part("plan").items() if isinstance(row, dict)}
    else:
        found = run.part(what)
    return {str(name): as_cell(value) for name, value in found.items()}


COMPARED = ("hyperparameters", "settings", "plan", "versions")


def differences(runs: list[RunFolder]) -> Rows:
    """Return what differs between the runs: kind, name, then the value in each run; empty text where it has none."""
    rows: Rows = []
    for what in COMPARED:
        values = [named(run, what) for run in runs]
        for name in dict.fromkeys(name for one in values for name in one):
            cells = [one.get(name, "") for one in values]
            if len(set(cells)) > 1:
                rows.append((what, name, *cells))
    return rows


def final_values(runs: list[RunFolder]) -> Rows:
    """Return the latest value of every metric in each run."""
    return [
        (name, *(f"{run.curves[name].last:.6g}" if name in run.curves else "" for run in runs)) for name in names(runs)
    ]


def names(runs: Iterable[RunFolder], key: Callable[[RunFolder], Iterable[str]] = lambda run: run.curves) -> list[str]:
    """Return the names of all runs, in their order, each once."""
    return list(dict.fromkeys(name for run in runs for name in key(run)))
