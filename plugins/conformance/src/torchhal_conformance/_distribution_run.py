"""Check every component of an installed distribution, each in a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torchhal import registry
from torchhal.cli import format_table
from torchhal.errors import ConfigurationError
from torchhal.plugin import KINDS
from torchhal.registry._discovery import canonical
from torchhal_conformance._report import file_name, missing_inputs_lines
from torchhal_conformance._supervised_process import OPTIONS, Request, run_supervised

UNFINISHED: Final = "unfinished.json"
WORST: Final = (1, 2, 0)
"""Exit codes, the worst one first: a failure counts more than what was not made."""


@dataclass(frozen=True)
class Row:
    """Result of one component; ``report`` is None where there is none, for ``reason``."""

    kind: str
    alias: str
    code: int
    report: Mapping[str, Any] | None
    reason: str = ""


def components_of(distribution: str) -> list[tuple[str, str]]:
    """Return the kind and the qualified alias of each component that ``distribution`` provides, in the order of KINDS.

    Those that can't be used are among them: nobody would miss them else.

    Raises:
        ConfigurationError: it provides none, is not installed, or has a plugin that isn't loaded.
    """
    wanted = canonical(distribution)
    records = [record for record in registry.plugins() if canonical(record.distribution) == wanted]
    if absent := [str(record) for record in records if record.status != "loaded"]:
        raise ConfigurationError("; ".join(absent))
    every = [(kind, entry) for kind in KINDS for entry in registry.entries(kind)]
    mine = [(kind, entry) for kind, entry in every if canonical(entry.distribution) == wanted]
    mine += [(entry.kind, entry) for record in records for entry in record.components if entry.problem]
    found = [(kind, entry.qualified_name) for one in KINDS for kind, entry in mine if kind == one]
    if not found:
        known = ", ".join(sorted({entry.distribution for _, entry in every}))
        raise ConfigurationError(
            f"no installed distribution {distribution!r} provides components for torchhal; these do: {known}"
        )
    return found


def run_each(
    distribution: str, folder: Path, request: Request, *, done: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Check each component of ``distribution`` and leave its report in ``folder``, one file per component.

    Args:
        distribution: its name, however written.
        folder: is made if missing.
        request: how to check them. Each component has what is for its kind of the arguments and the ids of checks;
            without ids all checks are made.
        done: is called with a line for each component when its checks have been made.

    Raises:
        ConfigurationError: an unknown distribution or id, or a folder that can't be written.
    """
    from torchhal_conformance._check import CHECKS, checks_for

    components = components_of(distribution)
    checks_for(KINDS[0])  # registers them
    if unknown := sorted(set(request.check) - set(CHECKS)):
        raise ConfigurationError(f"--check must name checks (got {', '.join(map(repr, unknown))})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNFINISHED).touch()
    except OSError as error:
        raise ConfigurationError(f"--reports {str(folder)!r} can't be written: {error}") from error
    rows = []
    for kind, alias in components:
        mine = [id for id in request.check if kind in CHECKS[id].kinds]
        if request.check and not mine:
            continue
        others: dict[str, Any] = {name: None for name, only in OPTIONS.items() if kind != only}
        row = _run_one(replace(request, kind=kind, alias=alias, check=mine, **others), folder)
        done(f"{kind} {row.alias}: {_verdict(row)}")
        rows.append(row)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return rows


def _run_one(request: Request, folder: Path) -> Row:
    unfinished = folder / UNFINISHED
    unfinished.unlink(missing_ok=True)
    try:
        code = run_supervised(replace(request, report=os.path.abspath(unfinished)), show=lambda line: None)
        assert code is not None  # nothing stops it
        try:
            report = json.loads(unfinished.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it died, and has written its reason to stderr
            return Row(request.kind, request.alias, 1, None, "its process ended")
        unfinished.replace(folder / file_name(report))
        return Row(request.kind, report["alias"], code, report)
    except ConfigurationError as error:
        return Row(request.kind, request.alias, 1, None, str(error))
    finally:
        unfinished.unlink(missing_ok=True)


def table_of(rows: Sequence[Row]) -> list[str]:
    """Return a line per component: how many checks of the core and beyond passed, of those made, and the verdict."""
    head = ("kind", "alias", "core", "extended", "failed", "verdict")
    return format_table([head, *(_cells(row) for row in rows)])


def _cells(row: Row) -> tuple[str, ...]:
    if row.report is None:
        return (row.kind, row.alias, "-", "-", "-", _verdict(row))
    shares = []
    for level in ("core", "extended"):
        counts = row.report["levels"].get(level, {"passed": 0, "failed": 0})
        shares.append(f"{counts['passed']}/{counts['passed'] + counts['failed']}")
    failed = ", ".join(one["id"] for one in row.report["checks"] if one["outcome"] == "failed")
    return (row.kind, row.alias, *shares, failed or "-", _verdict(row))


def _verdict(row: Row) -> str:
    if row.report is None:
        return f"no report: {row.reason.partition(chr(10))[0]}"
    verdict: str = row.report["verdict"]
    return verdict


def missing_inputs_of(rows: Sequence[Row]) -> list[str]:
    """Return a line for each argument that an incomplete component lacks, and what it is for."""
    return [
        f"{row.kind} {row.alias}: {line}"
        for row in rows
        if row.report is not None
        for line in missing_inputs_lines(row.report)
    ]


def worst(codes: Sequence[int]) -> int:
    """Return the worst of exit codes; one that no run returns by itself, such as a signal's, counts as a failure."""
    known = {code if code in WORST else 1 for code in codes}
    return next((code for code in WORST if code in known), 0)
