"""Compare two reports of one component: what passes now, what fails now, and what is new, gone or slower."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torchhal.errors import ConfigurationError

SLOWER: Final = (2.0, 1.0)
"""Factor and seconds by which a check takes longer than before to be named as slower."""


@dataclass
class Difference:
    """Difference between two reports: ids of checks, each with a text of both outcomes."""

    passes_now: dict[str, str] = field(default_factory=dict)
    fails_now: dict[str, str] = field(default_factory=dict)
    skipped_now: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    slower: dict[str, str] = field(default_factory=dict)
    worse: list[str] = field(default_factory=list)
    """Ids of the checks that got worse."""


def read_report(path: str) -> dict[str, Any]:
    """Return the report in a file; ConfigurationError for a file that holds none of schema 1."""
    try:
        report: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path!r} can't be read as a report: {error}") from error
    if not _is_report(report):
        raise ConfigurationError(f"{path!r} must hold a conformance report of schema 1, as --report writes it")
    return report


def _is_report(report: Any) -> bool:
    """Return whether it has what :func:`compare` reads; it may be of another release of the kit."""
    if not isinstance(report, dict) or report.get("schema") != 1 or not {"kind", "alias"} <= report.keys():
        return False
    checks = report.get("checks")
    read = {"id": str, "level": str, "outcome": str, "reason": str, "seconds": int | float}
    return isinstance(checks, list) and all(
        isinstance(one, dict) and all(isinstance(one.get(key), kind) for key, kind in read.items()) for one in checks
    )


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference:
    """Return what differs in ``new``.

    Worse are: a check that failed and did not before, one that passed and is skipped now or gone, one that is slower,
    and a new one that fails unless it is provisional.

    Raises:
        ConfigurationError: reports of two components.
    """
    names = [f"{report['kind']} {report['alias']}" for report in (old, new)]
    if names[0] != names[1]:
        raise ConfigurationError(f"both reports must be of one component (got {names[0]} and {names[1]})")
    before, now = ({one["id"]: one for one in report["checks"]} for report in (old, new))
    found = Difference()
    for id, one in now.items():
        if id in before:
            _compare(found, id, before[id], one)
            continue
        found.new[id] = _with_reason(one)
        if one["outcome"] == "failed" and one["level"] != "provisional":
            found.worse.append(id)
    for id, one in before.items():
        if id not in now:
            found.gone[id] = f"{one['outcome']} before"
            if one["outcome"] == "passed":
                found.worse.append(id)
    return found


def _compare(found: Difference, id: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if old["outcome"] != new["outcome"]:
        changed = {"passed": found.passes_now, "failed": found.fails_now, "skipped": found.skipped_now}
        changed[new["outcome"]][id] = f"{old['outcome']} before{_because(new)}"
        if new["outcome"] == "failed" or (new["outcome"], old["outcome"]) == ("skipped", "passed"):
            found.worse.append(id)
    elif new["outcome"] == "passed":
        factor, seconds = SLOWER
        if new["seconds"] > factor * old["seconds"] and new["seconds"] - old["seconds"] > seconds:
            found.slower[id] = f"{old['seconds']:.2f} s before, {new['seconds']:.2f} s now"
            found.worse.append(id)


def _with_reason(one: Mapping[str, Any]) -> str:
    return f"{one['outcome']}{_because(one)}"


def _because(one: Mapping[str, Any]) -> str:
    first = (one["reason"].splitlines() or [""])[0]
    return f": {first}" if first else ""


def lines_of(difference: Difference, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the difference as lines for a terminal, with the versions that changed first."""
    lines = [
        f"{name}: {old['versions'].get(name, 'none')} -> {new['versions'].get(name, 'none')}"
        for name in sorted({**old["versions"], **new["versions"]})
        if old["versions"].get(name) != new["versions"].get(name)
    ]
    for name in ("passes_now", "fails_now", "skipped_now", "new", "gone", "slower"):
        told: dict[str, str] = getattr(difference, name)
        lines += [f"{name.replace('_', ' ')}: {id} ({text})" for id, text in told.items()]
    verdicts = f"{old['verdict']} -> {new['verdict']}" if old["verdict"] != new["verdict"] else new["verdict"]
    worse = f"worse in {', '.join(difference.worse)}" if difference.worse else "nothing got worse"
    return [*lines, f"{new['kind']} {new['alias']}: {verdicts}, {worse}"]
