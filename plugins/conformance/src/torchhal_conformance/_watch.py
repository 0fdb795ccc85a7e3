"""Run checks again when a source file of the component's distribution changes."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torchhal.cli import echo
from torchhal.errors import ConfigurationError
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._supervised_process import Request, ended_by_sigterm, run_supervised

INTERVAL: Final = 0.5
"""Seconds between two looks at the files."""

Stamp = dict[str, tuple[int, int]]
"""File -> its time of modification in ns and its size."""


def sources(request: Request) -> list[Path]:
    """Return the folders and files whose changes matter: the component's package and project, and its tables.

    Nothing of the component is imported: it may be what hangs.
    """
    module, colon, _ = request.alias.partition(":")
    source = None
    if colon:
        sys.path.insert(0, os.getcwd())  # as under python -m
    else:
        component = ComponentUnderTest.of(request.kind, request.alias)
        module, source = component.entry.component.target.partition(":")[0], component.source
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    found = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    if source is not None:
        found += [source / "src", source / "pyproject.toml"]
    found += [] if request.tables is None else [Path(request.tables)]
    return [path for path in found if path.exists()]


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


class _Changes:
    """Whether files have changed, which is looked at every INTERVAL seconds at most."""

    def __init__(self, paths: Sequence[Path], before: Stamp) -> None:
        self._paths, self._before, self._next = paths, before, 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + INTERVAL
        return stamp(self._paths) != self._before


def watch(
    request: Request, paths: Sequence[Path], *, sleep: Callable[[float], Any] = time.sleep, runs: int | None = None
) -> int:
    """Make the checks at once and after each change in ``paths``, until Ctrl-C.

    Each run is a process of its own, which imports the changed code; a change ends the run before. After a run with
    failures only the failed checks are made, after one without all of them.

    Args:
        request: what to check.
        paths: folders and files to look at.
        sleep: waits between two looks.
        runs: after so many the exit code of the last one is returned; None for no limit.
    """
    failed: list[str] = []
    made = 0
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="torchhal-watch-") as folder:
        report = Path(folder, "report.json")
        while True:
            before = stamp(paths)
            report.unlink(missing_ok=True)
            chosen = replace(request, check=failed or request.check, report=str(report))
            code = _run(chosen, _Changes(paths, before))
            made += 1
            if made == runs:
                return 1 if code is None else code
            failed = _failed(report, failed)
            if code is not None:
                echo(f"{', '.join(failed)} will run again" if failed else "waiting for a change")
            while stamp(paths) == before:
                sleep(INTERVAL)


def _run(request: Request, changed: Callable[[], bool]) -> int | None:
    """Return the exit code of a run, None where ``changed`` ended it."""
    try:
        code = run_supervised(request, stop=changed)
    except ConfigurationError as error:  # a class that an edit has renamed, say
        print(f"error: {error}", file=sys.stderr)
        return 2
    if code is None:
        echo("a file has changed: the run begins again")
    return code


def _failed(report: Path, before: list[str]) -> list[str]:
    """Return the ids that failed; those of the run before where the process wrote no report."""
    try:
        checks = json.loads(report.read_text(encoding="utf-8"))["checks"]
    except (OSError, ValueError):
        return before
    return [one["id"] for one in checks if one["outcome"] == "failed"]
