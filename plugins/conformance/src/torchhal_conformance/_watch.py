"""Run checks again when a source file of the component's distribution changes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from torchhal.cli import echo
from torchhal_conformance._component_under_test import ComponentUnderTest

INTERVAL: Final = 0.5
"""Seconds between two looks at the files."""

Stamp = dict[str, tuple[int, int]]
"""File -> its time of modification in ns and its size."""


def sources(component: ComponentUnderTest, given: Iterable[str] = ()) -> list[Path]:
    """Return the folders and files whose changes matter: the component's package and project, and ``given`` files."""
    top = component.entry.component.target.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(top)
    found = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    if component.source is not None:
        found += [component.source / "src", component.source / "pyproject.toml"]
    return [path for path in [*found, *map(Path, given)] if path.exists()]


def stamp(paths: Iterable[Path]) -> Stamp:
    """Return the times and sizes of all Python files in ``paths``, and of those that are files themselves."""
    found: Stamp = {}
    for path in paths:
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            try:
                state = file.stat()
            except OSError:  # between two versions of it
                continue
            found[os.path.realpath(file)] = (state.st_mtime_ns, state.st_size)
    return found


def watch(
    arguments: Sequence[str],
    paths: Sequence[Path],
    ids: Sequence[str],
    *,
    sleep: Callable[[float], Any] = time.sleep,
    runs: int | None = None,
) -> int:
    """Run ``torchhal conformance run`` with ``arguments`` at once and after each change in ``paths``, until Ctrl-C.

    Each run is a process of its own, which imports the changed code. After a run with failures only the failed checks
    are made, after one without all of them.

    Args:
        arguments: of the command, without ``--check``, ``--report`` and ``--watch``.
        paths: folders and files to look at.
        ids: of the checks; empty for all.
        sleep: waits between two looks.
        runs: after so many the exit code of the last one is returned; None for no limit.
    """
    failed: list[str] = []
    made = 0
    with tempfile.TemporaryDirectory(prefix="torchhal-watch-") as folder:
        report = Path(folder, "report.json")
        while True:
            before = stamp(paths)
            code = _run(arguments, failed or ids, report)
            made += 1
            if made == runs:
                return code
            failed = _failed(report, failed)
            echo(f"{', '.join(failed)} will run again" if failed else "waiting for a change")
            while stamp(paths) == before:
                sleep(INTERVAL)


def _run(arguments: Sequence[str], ids: Sequence[str], report: Path) -> int:
    chosen = [word for id in ids for word in ("--check", id)]
    command = [sys.executable, "-m", "torchhal.cli", "conformance", "run", *arguments, *chosen, "--report", str(report)]
    report.unlink(missing_ok=True)
    return subprocess.run(command, check=False).returncode


def _failed(report: Path, before: list[str]) -> list[str]:
    """Return the ids that failed; those of the run before where the process wrote no report."""
    try:
        checks = json.loads(report.read_text(encoding="utf-8"))["checks"]
    except (OSError, ValueError):
        return before
    return [one["id"] for one in checks if one["outcome"] == "failed"]
