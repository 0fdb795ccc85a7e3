"""Build the report of a run of checks as a JSON document, and derive JUnit XML and a badge from it."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

import torch

import torchhal
from torchhal_conformance._check import LEVELS, checks_for
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._hardware import describe_hardware
from torchhal_conformance._session import ENVIRONMENT, INPUT, NOT_GIVEN, NOT_MADE, Result

SCHEMA: Final = 1
KIT: Final = torchhal.__version__
"""The kit's version: it is released with the core."""


def build(
    component: ComponentUnderTest, results: Sequence[Result], expected: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the report: schema 1, described in docs/reference/conformance.md.

    ``expected``: id -> why the component is known to fail it; the reason of such a failure begins with it.
    """
    known = expected or {}
    plugin = component.plugin
    versions = {
        "kit": KIT, "torchhal": torchhal.__version__, "torch": str(torch.__version__),
        "python": platform.python_version(),
    }  # fmt: skip
    if plugin is not None:
        versions[plugin.distribution] = plugin.version or "unknown"
    checks = [
        {
            "id": result.check.id,
            "level": result.check.level_under(component.contract),
            "outcome": result.outcome,
            "reason": _reason(result, known.get(result.check.id)),
            "seconds": result.seconds,
            **_failure(result),
        }
        for result in results
    ]
    given = {"model": component.model, "data": component.data}
    return {
        "schema": SCHEMA,
        "kind": component.kind,
        "alias": component.reported_as,
        "plugin": component.entry.distribution,
        "versions": versions,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "contract": component.contract,
        "device": _device(component),
        "hardware": _hardware(component),
        "features": sorted(component.declared) if component.entry.availability() else sorted(component.features),
        "arguments": {name: repr(value) for name, value in sorted(component.arguments.items())},
        **{name: str(factory) for name, factory in given.items() if factory is not None},
        "seed": component.seed,
        "levels": {level: _counts(checks, level) for level in LEVELS if any(one["level"] == level for one in checks)},
        "checks": checks,
        "verdict": verdict(
            checks,
            complete={one.id for one in checks_for(component.kind, level="core", contract=component.contract)},
        ),
    }


def _failure(result: Result) -> dict[str, str]:
    """Return what is known of a failure beside its reason."""
    names = ("follows_from", "error", "at", "traceback")
    return {name: getattr(result, name) for name in names if getattr(result, name)}


def _reason(result: Result, expected: str | None) -> str:
    return f"expected: {expected}\n{result.reason}" if expected and result.outcome == "failed" else result.reason


def verdict(checks: Sequence[Mapping[str, Any]], *, complete: Collection[str] = ()) -> str:
    """Return ``failed``, ``incomplete``, ``partial``, or ``conformant``.

    It is ``incomplete`` where a check of the core was not made for want of an argument that only the author can give,
    and ``partial`` where this machine couldn't make one. A provisional check changes nothing, nor does one about a
    feature that isn't declared. Without one of those in ``complete``, ids, it is ``partial`` at best: nobody made them.
    """
    counting = [one for one in checks if one["level"] != "provisional"]
    if any(one["outcome"] == "failed" for one in counting):
        return "failed"
    if any(one["level"] == "core" and _lacks(one, INPUT) for one in counting):
        return "incomplete"
    left_out = not set(complete) <= {one["id"] for one in checks} or any(
        _lacks(one, ENVIRONMENT) or _lacks(one, INPUT) or _lacks(one, NOT_MADE) for one in counting
    )
    return "partial" if left_out or not any(one["outcome"] == "passed" for one in counting) else "conformant"


def file_name(report: Mapping[str, Any], accelerator: str = "") -> str:
    """Return the name of a report's file in a folder of reports.

    ``accelerator``: alias of what a precision or strategy was checked on; without it, the report's device says it.
    """
    on = accelerator or report["device"].partition(" x ")[0]
    where = f".{on}" if report["kind"] in ("precision", "strategy") else ""
    how = "".join(f".{name}" for name in report["arguments"])
    return f"{report['plugin']}.{report['kind']}.{report['alias']}{where}{how}.json"


def _lacks(one: Mapping[str, Any], beginning: str) -> bool:
    return bool(one["outcome"] == "skipped" and one["reason"].startswith(beginning))


def missing_inputs(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what the author has to give for the core checks that were not made: reason -> their ids."""
    found: dict[str, list[str]] = {}
    for one in report["checks"]:
        if one["level"] == "core" and _lacks(one, INPUT):
            found.setdefault(one["reason"].removeprefix(INPUT).strip(), []).append(one["id"])
    return found


def missing_inputs_lines(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason of :func:`missing_inputs`."""
    return [
        f"{len(ids)} check{'s' if len(ids) > 1 else ''} of the core {'were' if len(ids) > 1 else 'was'} not made "
        f"({', '.join(ids)}): {reason}"
        for reason, ids in missing_inputs(report).items()
    ]


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each check that says nothing for want of an argument, which changes no verdict."""
    skipped = [one for one in report["checks"] if _lacks(one, NOT_GIVEN)]
    return [f"{one['id']} was not made: {one['reason'].removeprefix(NOT_GIVEN).strip()}" for one in skipped]


def summary(report: Mapping[str, Any]) -> list[str]:
    """Return the last lines of the command's output: the outcomes at each level, what is to be given, the verdict."""
    lines = [
        f"{level}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}"
        for level, counts in report["levels"].items()
    ]
    return [
        *lines,
        *notes(report),
        *missing_inputs_lines(report),
        f"{report['kind']} {report['alias']} is {report['verdict']}",
    ]


def _counts(checks: Sequence[Mapping[str, Any]], level: str) -> dict[str, int]:
    mine = [one["outcome"] for one in checks if one["level"] == level]
    return {outcome: mine.count(outcome) for outcome in ("passed", "failed", "skipped")}


def _device(component: ComponentUnderTest) -> str:
    if component.kind == "accelerator" and not component.makes_instances:
        return "none: an instance ends or blocks the process"
    try:
        accelerator = component.make_accelerator()
        state = type(accelerator).availability()
        return f"{accelerator.name} x {accelerator.device_count()}" if state else f"none: {state.reason}"
    except Exception as error:
        return f"none: {error}"


def _hardware(component: ComponentUnderTest) -> str:
    if component.kind == "accelerator" and not component.makes_instances:
        return "none"
    try:
        accelerator = component.make_accelerator()
        state = type(accelerator).availability()
        return describe_hardware(accelerator) if state else "none"
    except Exception:  # the reason is in "device"
        return "none"


def junit(report: Mapping[str, Any]) -> str:
    """Return the report as the JUnit XML that CI systems show."""
    checks = report["checks"]
    count = {outcome: sum(one["outcome"] == outcome for one in checks) for outcome in ("failed", "skipped")}
    name = quoteattr(f"torchhal.{report['kind']}.{report['alias']}")
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuite name={name} tests="{len(checks)}" failures="{count["failed"]}" skipped="{count["skipped"]}" '
        f'time="{sum(one["seconds"] for one in checks):.3f}">',
    ]
    for one in checks:
        case = f'  <testcase classname={name} name="{one["id"]}" time="{one["seconds"]:.3f}"'
        if one["outcome"] == "passed":
            lines.append(f"{case}/>")
        else:
            tag = "failure" if one["outcome"] == "failed" else "skipped"
            first = quoteattr(follows(one) + (one["reason"].splitlines() or [""])[0])
            lines.append(f"{case}><{tag} message={first}>{escape(_printable(one['reason']))}</{tag}></testcase>")
    return "\n".join([*lines, "</testsuite>", ""])


def follows(one: Mapping[str, Any]) -> str:
    """Return ``follows from ID: `` for a failure that does, else an empty string."""
    return f"follows from {one['follows_from']}: " if one.get("follows_from") else ""


def _printable(text: str) -> str:
    """Return ``text`` without the characters that XML can't represent."""
    return "".join(letter for letter in text if letter in "\n\t" or letter.isprintable())


_COLOURS: Final = {"conformant": "brightgreen", "partial": "yellow", "incomplete": "orange", "failed": "red"}


def badge(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report as an endpoint badge of shields.io."""
    return {
        "schemaVersion": 1,
        "label": f"torchhal {report['kind'].replace('_', ' ')}",
        "message": report["verdict"],
        "color": _COLOURS[report["verdict"]],
    }
