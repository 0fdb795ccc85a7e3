"""Check every component of an installed distribution, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchhal import registry
from torchhal.cli import format_table
from torchhal.errors import ConfigurationError
from torchhal.plugin import KINDS
from torchhal.registry._discovery import canonical
from torchhal_conformance._report import file_name

WORST: Final = (1, 2, 0)
"""Exit codes, the worst one first: a failure counts more than what was not made."""
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "--tables": ("cluster_environment",),
    "--launcher": ("cluster_environment",),
    "--model": ("strategy",),
    "--data": ("strategy",),
    "--accelerator": ("precision", "strategy"),
}
"""Option -> the kinds of components that it is passed on to; others are for all."""


@dataclass(frozen=True)
class Row:
    """Result of one component; ``report`` is None where its process ended without one."""

    kind: str
    alias: str
    code: int
    report: Mapping[str, Any] | None


def components_of(distribution: str) -> list[tuple[str, str]]:
    """Return the kind and the qualified alias of each component that ``distribution`` provides, in the order of KINDS.

    Raises:
        ConfigurationError: it provides none, or is not installed.
    """
    every = [(kind, entry) for kind in KINDS for entry in registry.entries(kind)]
    wanted = canonical(distribution)
    found = [(kind, entry.qualified_name) for kind, entry in every if canonical(entry.distribution) == wanted]
    if not found:
        known = ", ".join(sorted({entry.distribution for _, entry in every}))
        raise ConfigurationError(
            f"no installed distribution {distribution!r} provides components for torchhal; these do: {known}"
        )
    return found


def run_each(distribution: str, folder: Path, options: Mapping[str, str], ids: Sequence[str] = ()) -> list[Row]:
    """Check each component of ``distribution`` and leave its report in ``folder``, one file per component.

    Args:
        distribution: its name, however written.
        folder: is made if missing.
        options: of ``torchhal conformance run`` with their values; see :data:`OPTIONS`.
        ids: of checks; each component has those that its kind has. Without any all checks are made.

    Raises:
        ConfigurationError: an unknown distribution or id.
    """
    from torchhal_conformance._check import CHECKS, checks_for

    components = components_of(distribution)
    checks_for(KINDS[0])  # registers them
    if unknown := sorted(set(ids) - set(CHECKS)):
        raise ConfigurationError(f"--check must name checks (got {', '.join(map(repr, unknown))})")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for kind, alias in components:
        mine = [id for id in ids if kind in CHECKS[id].kinds]
        if ids and not mine:
            continue
        words = [word for name, value in options.items() if kind in OPTIONS.get(name, KINDS) for word in (name, value)]
        rows.append(_run_one(kind, alias, folder, [*words, *(word for id in mine for word in ("--check", id))]))
    return rows


def _run_one(kind: str, alias: str, folder: Path, options: Sequence[str]) -> Row:
    unfinished = folder / "unfinished.json"
    unfinished.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torchhal.cli", "conformance", "run", kind, alias, "--report", str(unfinished)]
    code = subprocess.run([*command, *options], stdout=subprocess.DEVNULL, check=False).returncode
    try:
        report = json.loads(unfinished.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it died, and has written its reason to stderr
        unfinished.unlink(missing_ok=True)
        return Row(kind, alias, 1, None)
    unfinished.replace(folder / file_name(report))
    return Row(kind, report["alias"], code, report)


def table_of(rows: Sequence[Row]) -> list[str]:
    """Return a line per component: how many checks of the core and beyond passed, of those made, and the verdict."""
    head = ("kind", "alias", "core", "extended", "failed", "verdict")
    return format_table([head, *(_cells(row) for row in rows)])


def _cells(row: Row) -> tuple[str, ...]:
    if row.report is None:
        return (row.kind, row.alias, "-", "-", "-", "no report: its process ended")
    shares = []
    for level in ("core", "extended"):
        counts = row.report["levels"].get(level, {"passed": 0, "failed": 0})
        shares.append(f"{counts['passed']}/{counts['passed'] + counts['failed']}")
    failed = ", ".join(one["id"] for one in row.report["checks"] if one["outcome"] == "failed")
    return (row.kind, row.alias, *shares, failed or "-", row.report["verdict"])


def worst(codes: Sequence[int]) -> int:
    """Return the worst of exit codes; one that no run returns by itself, such as a signal's, counts as a failure."""
    known = {code if code in WORST else 1 for code in codes}
    return next((code for code in WORST if code in known), 0)
