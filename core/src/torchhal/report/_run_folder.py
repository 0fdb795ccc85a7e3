"""Read everything that a run has left in its folder, whatever state it is in."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from torchhal.errors import ConfigurationError
from torchhal.report._fit_curves import Curve
from torchhal.report._metrics import CSV_FILE, read_curves
from torchhal.report._record import RECORD_FILE, DamagedRecordError, read_record
from torchhal.report._regular_files import read_text

_HPARAMS = "hparams.json"
_CHECKPOINTS = "checkpoints"


@dataclass
class RunFolder:
    """What a run has left in its folder.

    Attributes:
        path: the folder.
        label: a short name, which differs between the runs of one report.
        fits: the fits that the record lists, the oldest first; see :mod:`torchhal.trainer._run_record`.
        curves: by the metric's name; "(fit 1)" after it marks an earlier fit that the latest doesn't continue, and
            "(evaluation)" what no fit has logged.
        hparams: the hyperparameters.
        checkpoints: name, bytes and time of each file, or folder, below ``checkpoints``.
        problems: what could not be read, as sentences.
    """

    path: str
    label: str
    fits: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    hparams: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def latest(self) -> dict[str, Any]:
        """The latest fit; empty without a record."""
        return self.fits[-1] if self.fits else {}

    def part(self, name: str) -> dict[str, Any]:
        """Return a mapping of the latest fit, such as ``"plan"``; empty where it is missing or none."""
        found = self.latest.get(name)
        return dict(found) if isinstance(found, Mapping) else {}

    def status(self, fit: Mapping[str, Any] | None = None) -> str:
        """Return how the latest fit, or the given one, stands, as a phrase."""
        fit = self.latest if fit is None else fit
        status, reason = str(fit.get("status", "")), str(fit.get("reason") or "")
        if not fit:
            return "not recorded"
        if status == "running":
            return (
                "running" if _is_alive(fit) else "was killed, or runs on another machine: nothing has recorded an end"
            )
        return f"{status}: {reason}" if reason else status


def read_run(path: str, label: str | None = None) -> RunFolder:
    """Read a run's folder.

    Args:
        path: the folder, such as ``torchhal_logs/version_0``.
        label: a short name; the folder's own if None.

    Raises:
        ConfigurationError: there is no such folder, or it is one of several runs.
    """
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "doesn't exist"
        raise ConfigurationError(
            f"'RUN_DIR' must be the folder of a run, such as torchhal_logs/version_0 (got {path!r}, which {what})"
        )
    path = os.path.abspath(path)
    try:
        names = set(os.listdir(path))
    except OSError as error:
        raise ConfigurationError(f"{path!r} can't be read: {error.strerror}") from error
    if not names & {RECORD_FILE, CSV_FILE, _HPARAMS, _CHECKPOINTS}:
        inner = sorted(name for name in names if os.path.exists(os.path.join(path, name, RECORD_FILE)))
        if inner:
            raise ConfigurationError(
                f"{path!r} is a folder with {len(inner)} run(s) in it: name one, such as "
                f"{os.path.join(path, inner[-1])!r}, or several to compare them"
            )
    run = RunFolder(path, label or os.path.basename(path) or path)
    try:
        run.fits = read_record(path)
    except DamagedRecordError as error:
        run.problems.append(str(error))
    except OSError as error:
        run.problems.append(f"{RECORD_FILE} can't be read: {error.strerror}")
    if not run.fits and not run.problems:
        run.problems.append(
            f"there is no {RECORD_FILE}: no fit with a logger has begun here, or one of a torchhal before 0.2"
        )
    run.curves, problems = read_curves(path, run.fits)
    run.problems += problems
    if not run.curves:
        run.problems.append("no metric was logged, or the logger keeps them elsewhere")
    run.hparams = _hparams(path, run.problems) or run.part("hparams")
    run.checkpoints = _checkpoints(os.path.join(path, _CHECKPOINTS))
    return run


def read_runs(paths: list[str]) -> list[RunFolder]:
    """Read the folders of several runs, each with a label that no other has.

    Raises:
        ConfigurationError: as :func:`read_run`.
    """
    runs = [read_run(path) for path in paths]
    depth = 1
    if len(runs) == 1:
        runs[0].label = os.path.join(*runs[0].path.split(os.sep)[-2:])
    while len({run.label for run in runs}) < len({run.path for run in runs}):
        depth += 1
        for run in runs:
            run.label = os.path.join(*run.path.split(os.sep)[-depth:])
    seen: dict[str, int] = {}
    for run in runs:  # one folder may be named twice
        seen[run.label] = seen.get(run.label, 0) + 1
        if seen[run.label] > 1:
            run.label += f" ({seen[run.label]})"
    return runs


def _hparams(folder: str, problems: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(read_text(os.path.join(folder, _HPARAMS)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{_HPARAMS} can't be read: {error}")
        return {}
    return found if isinstance(found, dict) else {}


def _checkpoints(folder: str) -> list[dict[str, Any]]:
    found = []
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return []
    for name in names:
        path = os.path.join(folder, name)
        try:
            inside = [os.path.join(root, file) for root, _, files in os.walk(path) for file in files] or [path]
            size, changed = sum(map(os.path.getsize, inside)), os.path.getmtime(path)
        except OSError:  # deleted meanwhile, by a run that goes on
            continue
        found.append({"name": name, "bytes": size, "written": changed})
    return sorted(found, key=lambda each: each["written"])


def as_time(seconds: Any) -> str:
    """Return a time, in seconds since the epoch, as local date and time; empty for what is none."""
    try:
        return datetime.fromtimestamp(float(seconds), tz=timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _is_alive(fit: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a fit's record runs on this machine."""
    pid = fit.get("pid")
    if fit.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
