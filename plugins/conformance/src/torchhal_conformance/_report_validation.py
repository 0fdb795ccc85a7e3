"""Validate reports that others send: their schema, and that verdict and counts follow from the checks they list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final

from torchhal.errors import ConfigurationError
from torchhal.plugin import KINDS
from torchhal_conformance._check import CHECKS, LEVELS, PREFIXES, Check, checks_for, release
from torchhal_conformance._report import KIT, SCHEMA, verdict

OUTCOMES: Final = ("passed", "failed", "skipped")
_FIELDS: Final[dict[str, type[Any]]] = {
    "kind": str, "alias": str, "plugin": str, "versions": dict, "date": str, "contract": str,
    "device": str, "hardware": str,
    "features": list, "arguments": dict, "seed": int, "levels": dict, "checks": list, "verdict": str,
}  # fmt: skip
"""Field -> its type in JSON."""
_CHECK_FIELDS: Final[dict[str, type[Any]]] = {"id": str, "level": str, "outcome": str, "reason": str}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")
_ID: Final = re.compile(r"[A-Z]{3}-[0-9]{2,3}")
_FILE: Final = re.compile(r"[A-Za-z0-9._-]+\.json")
_UNDECLARED: Final = re.compile(r"feature (.+) is not declared")
_LONGEST_CHECK: Final = 1e6
"""Seconds that no check takes."""
_LONGEST: Final = 300
"""Characters of a text that is shown in one line."""


class ReportRefused(ConfigurationError):
    """Refusal of a report; its message has the file's name and the reason."""


def read_reports(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the reports in the JSON files of ``folder``, file name -> report, in the order of their names.

    Raises:
        ReportRefused: files are damaged, of another schema, or contradict themselves, or two are of one run; the
            message has a line for each.
    """
    found: dict[str, dict[str, Any]] = {}
    runs: dict[tuple[Any, ...], str] = {}
    refused = []
    for path in sorted(folder.glob("*.json")):
        try:
            report = read_report(path)
        except ReportRefused as error:
            refused.append(str(error))
            continue
        run = (*subject(report), report["date"])
        if run in runs:
            refused.append(f"{path.name}: it is of the same run as {runs[run]}: remove one of them")
            continue
        runs[run] = path.name
        found[path.name] = report
    if refused:
        raise ReportRefused("\n".join(refused))
    return found


def read_report(path: Path) -> dict[str, Any]:
    """Return the report in ``path``.

    Raises:
        ReportRefused: the file is damaged, of another schema, or contradicts itself.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReportRefused(f"{_shown(path)}: it can't be read as JSON: {error}") from error
    if why := problem(report) or _file_problem(path.name, report):
        raise ReportRefused(f"{_shown(path)}: {why}")
    assert isinstance(report, dict)
    return report


def _shown(path: Path) -> str:
    return path.name if path.name.isprintable() else ascii(path.name)


def _file_problem(name: str, report: Mapping[str, Any]) -> str:
    """Return why a report can't have this file name, which the hub's page links; an empty text if it can."""
    begins = f"{report['plugin']}.{report['kind']}.{report['alias']}."
    if name.startswith(begins) and _FILE.fullmatch(name):
        return ""
    return f"the file must be named {begins}json, or with more letters, digits, '.', '_' and '-' before 'json'"


def made_before(report: Mapping[str, Any]) -> list[str]:
    """Return the ids of the checks that its kit didn't have yet, although it is of the release that they came with.

    Empty for a run that left out others, too: it may have left out these.
    """
    kit = release(report["versions"]["kit"])
    absent = _absent(report)
    return [] if any(release(one.since) < kit for one in absent) else [one.id for one in absent]


def _absent(report: Mapping[str, Any]) -> list[Check]:
    """Return the checks that count for its component and of which it has no result."""
    made, declared, contract = {one["id"] for one in report["checks"]}, set(report["features"]), report["contract"]
    return [
        one
        for one in checks_for(report["kind"], contract=contract)
        if one.id not in made and one.features <= declared and one.level_under(contract) != "provisional"
    ]


def newest(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the file names of one report per component and hardware, the newest of each, newest first."""
    by_date = sorted(reports, key=lambda file: (moment(reports[file]), file), reverse=True)
    first: dict[tuple[Any, ...], str] = {}
    for file in by_date:
        first.setdefault(subject(reports[file]), file)
    return list(first.values())


def subject(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the subject of a report: the component, its arguments, and the hardware that it was checked on."""
    given = tuple(sorted(report["arguments"].items()))
    extra = tuple(str(report.get(name, "")) for name in ("model", "data"))
    on = report["device"].partition(" x ")[0] if " x " in report["device"] else ""
    return (report["plugin"], report["kind"], report["alias"], given, *extra, on, report["hardware"])


def moment(report: Mapping[str, Any]) -> datetime:
    """Return the time of the run, which has a time zone."""
    return datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", report["date"]))


def problem(report: Any) -> str:
    """Return the first reason why ``report`` can't be accepted; an empty text for one that can."""
    return next(_problems(report), "")


def _problems(report: Any) -> Iterator[str]:
    """Yield the reasons; those after the first may be errors, since it has left out what they read."""
    if not isinstance(report, dict):
        yield f"a report must be a JSON object (got {type(report).__name__})"
        return
    schema = report.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        newer = ", which a newer kit has written: update torchhal-conformance" if _is_newer(schema) else ""
        yield f"'schema' must be {SCHEMA} (got {schema!r}{newer})"
        return
    try:
        json.dumps(report, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # half of a character that UTF-16 writes as two; deep nesting
        yield f"it can't be written as JSON in UTF-8: {error}"
        return
    yield from _field_problems(report)
    yield from _check_problems(report)
    yield from _conclusion_problems(report)


def _is_newer(schema: Any) -> bool:
    return type(schema) is int and schema > SCHEMA


def _field_problems(report: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in _FIELDS.items():
        if name not in report:
            yield f"{name!r} is missing: make the report with a kit that writes it"
        elif type(report[name]) is not kind:
            yield f"{name!r} must be a {kind.__name__} (got {report[name]!r:.80})"
    if report["kind"] not in KINDS:
        yield f"'kind' must be one of {', '.join(map(repr, KINDS))} (got {report['kind']!r})"
    for name in ("alias", "plugin"):
        if not _NAME.fullmatch(report[name]):
            yield f"{name!r} must be a name of letters, digits, '.', '_' and '-' (got {report[name]!r:.80})"
    if report["plugin"] == "user":
        yield "'plugin' is 'user', a class of no distribution: check the component by its alias"
    for name in ("device", "hardware"):
        if not _is_line(report[name]) and not (name == "device" and report[name].startswith("none:")):
            yield f"{name!r} must be one line of at most {_LONGEST} characters (got {report[name]!r:.80})"
    yield from _text_problems(report)
    yield from _version_problems(report)
    try:
        when = moment(report)
    except ValueError:
        yield f"'date' must be an ISO 8601 date and time (got {report['date']!r:.80})"
        return
    if when.tzinfo is None:
        yield f"'date' must have a time zone, such as '+00:00' (got {report['date']!r})"
    elif when > datetime.now(timezone.utc) + timedelta(days=1):
        yield f"'date' is in the future (got {report['date']!r})"


def _text_problems(report: Mapping[str, Any]) -> Iterator[str]:
    features = report["features"]
    if not all(isinstance(name, str) and _is_line(name) for name in features) or len(set(features)) < len(features):
        yield f"'features' must be names, each there once (got {features!r:.80})"
    for name, value in report["arguments"].items():
        if not name.isidentifier() or not isinstance(value, str):
            yield f"'arguments' must have a text for each name of an argument (got {name!r:.40}: {value!r:.40})"
    for name in ("model", "data"):
        if name in report and not (isinstance(report[name], str) and _is_line(report[name])):
            yield f"{name!r} must be MODULE:FACTORY (got {report[name]!r:.80})"


def _is_line(text: str) -> bool:
    return bool(text.strip()) and text.isprintable() and len(text) <= _LONGEST


def _version_problems(report: Mapping[str, Any]) -> Iterator[str]:
    versions = report["versions"]
    for name in ("kit", "torchhal", "torch", "python", report["plugin"]):
        version = versions.get(name)
        if not isinstance(version, str) or not _VERSION.fullmatch(version):
            yield f"'versions' must have the version of {name!r} (got {version!r:.80})"
    if release(versions["kit"]) == ():
        yield f"the version of 'kit' must begin with numbers (got {versions['kit']!r})"
    if not re.fullmatch(r"\d+\.\d+", contract := report["contract"]) or release(contract) > release(versions["kit"]):
        yield f"'contract' must be a release such as '0.1', and no later one than the kit's (got {contract!r:.80})"


def _check_problems(report: Mapping[str, Any]) -> Iterator[str]:
    kind, kit, contract = report["kind"], release(report["versions"]["kit"]), report["contract"]
    seen: set[str] = set()
    for one in report["checks"]:
        if not isinstance(one, dict) or any(
            type(one.get(name)) is not wanted for name, wanted in _CHECK_FIELDS.items()
        ):
            yield f"each of 'checks' must have {', '.join(map(repr, _CHECK_FIELDS))}, strings (got {one!r:.80})"
            continue
        id, seconds = one["id"], one.get("seconds")
        if not _ID.fullmatch(id):
            yield f"'checks' has {id!r:.80}, which is no id of a check"
        if id in seen:
            yield f"'checks' has {id} more than once"
        seen.add(id)
        if one["level"] not in LEVELS:
            yield f"{id}: 'level' must be one of {', '.join(map(repr, LEVELS))} (got {one['level']!r:.80})"
        if one["outcome"] not in OUTCOMES:
            yield f"{id}: 'outcome' must be one of {', '.join(map(repr, OUTCOMES))} (got {one['outcome']!r:.80})"
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < _LONGEST_CHECK:
            yield f"{id}: 'seconds' must be a number from 0 (got {seconds!r:.80})"
        if one["outcome"] != "passed" and not one["reason"].strip():
            yield f"{id} {one['outcome']} without a reason"
        for name in ("error", "at", "traceback", "follows_from"):
            if not isinstance(one.get(name, ""), str):
                yield f"{id}: {name!r} must be a text (got {one[name]!r:.80})"
        if one["outcome"] == "skipped" and (found := _UNDECLARED.fullmatch(one["reason"])):
            declared = [name for name in re.findall(r"'([^']+)'", found[1]) if name in report["features"]]
            if declared:
                yield f"{id} skipped, since feature {declared[0]!r} is not declared, and 'features' has it"
        known = CHECKS[id].features if id in CHECKS and kit == release(KIT)[:2] else frozenset()
        if one["outcome"] != "skipped" and (lacking := sorted(known - set(report["features"]))):
            yield f"{id} {one['outcome']}, which is for the feature {lacking[0]!r}, and 'features' lacks it"
        yield from _known_problems(one, kind, kit, contract)


def _known_problems(one: Mapping[str, str], kind: str, kit: tuple[int, ...], contract: str) -> Iterator[str]:
    """Yield what contradicts this kit; a check that a newer one has added is not known here."""
    id = one["id"]
    known = CHECKS.get(id)
    if kind not in PREFIXES.get(id[:3], KINDS if kit > release(KIT)[:2] else ()):
        yield f"{id} is no check of kind {kind!r}"
    elif known is None and kit <= release(KIT)[:2]:
        yield f"{id} is no check of kit {KIT}"
    elif known is not None and kit == release(KIT)[:2] and one["level"] != known.level_under(contract):
        yield f"{id} is {known.level_under(contract)} (the report has {one['level']!r})"


def _conclusion_problems(report: Mapping[str, Any]) -> Iterator[str]:
    checks, kit = report["checks"], release(report["versions"]["kit"])
    for level in LEVELS:
        outcomes = [one["outcome"] for one in checks if one["level"] == level]
        counted = {outcome: outcomes.count(outcome) for outcome in OUTCOMES} if outcomes else None
        if report["levels"].get(level) != counted:
            yield f"'levels' has {report['levels'].get(level)!r:.80} for {level!r}, and its checks make {counted!r}"
    if unknown := sorted(report["levels"].keys() - set(LEVELS)):
        yield f"'levels' has {unknown[0]!r:.80}, which is no level"
    # a check of the kit's own release may have come after this report was made: made_before() says so
    lacking = [one.id for one in _absent(report) if release(one.since) < kit]
    right = verdict(checks, complete=lacking)
    # a newer kit may have more checks than this one knows, and the run may have left those out
    beyond = kit > release(KIT)[:2] and (report["verdict"], right) == ("partial", "conformant")
    left_out = report["verdict"] == "partial" and right == "conformant" and made_before(report)
    if report["verdict"] != right and not beyond and not left_out:
        told = f", without {', '.join(lacking[:4])}{' ...' if len(lacking) > 4 else ''}" if lacking else ""
        yield f"'verdict' is {report['verdict']!r:.80}, and its checks make {right!r}{told}"
