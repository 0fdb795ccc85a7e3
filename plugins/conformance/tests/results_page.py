"""Generate docs/reference/conformance-results.md, the hub: a row for each report in docs/hub/reports.

``python plugins/conformance/tests/results_page.py [FOLDER]`` validates the reports, as ``torchhal conformance run
--report`` writes them, and writes the page anew. With FOLDER it first takes over the reports there, as the suites write
them with ``TORCHHAL_CONFORMANCE_REPORTS=FOLDER``; other reports stay. ``make conformance`` makes all of our own.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torchhal import registry
from torchhal.errors import ConfigurationError
from torchhal.plugin import KINDS
from torchhal.registry._discovery import CORE
from torchhal.registry._entry import RegistryEntry
from torchhal_conformance._check import checks_for
from torchhal_conformance._report import notes
from torchhal_conformance._report_validation import made_before, newest, read_report, read_reports

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "conformance-results.md"
REPORTS = ROOT / "docs" / "hub" / "reports"
_SUITE = re.compile(r'conformance_suite\(\s*"(\w+)",\s*"([^"]+)"')
HEAD = """# Conformance reports

<!-- made by plugins/conformance/tests/results_page.py from docs/hub/reports -->

Each row is one run of [the conformance kit](conformance.md) and links its report: the newest of the component on that
hardware, the newest row first. Anyone can [send one](../how-to/publish-a-conformance-report.md#send-it-to-the-hub); its
verdict and counts are refused unless they follow from the checks that it lists.

"level" is the highest level of which a check was made and none failed, with how many passed of those made; a check that
says nothing about a component, or is about a feature that it doesn't declare, is not made. `partial`: the machine of
the run could not make some. "made before CHECK existed": the kit of the run was older than that check, of which the
verdict says nothing.

Of the components in torchhal's own repository, `sim` is a simulated device; Gaudi, the IPU and Bagua are the stubs of
`plugins/*/stub`, and XLA is its own CPU device. Their rows say that the plugin keeps its contract on these, not what
the hardware does.
"""

WITHOUT_REPORT = {
    ("callback", "backbone_finetuning"): "trains models with a `backbone`; the kit's has none",
    ("precision", "ipu-16-mixed"): "works within compiled steps only; the kit checks precisions by torch's operators",
}
"""Component -> the reason why it has no row, unless it is a class with other defaults."""


def first_party() -> dict[tuple[str, str], RegistryEntry]:
    """Return every component of the core and of the plugins of this repository, by kind and alias."""
    folders = {path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml")}
    found = {}
    for kind in KINDS:
        for entry in registry.entries(kind):
            if entry.plugin == CORE or entry.distribution.removeprefix("torchhal-") in folders:
                found[kind, entry.component.alias] = entry
    return found


def _first(reason: str) -> str:
    return (reason.splitlines() or [""])[0]


def rows(folder: Path = REPORTS) -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, report) of each row: the newest report per component and hardware, newest first."""
    reports = read_reports(folder)
    return [(file, reports[file]) for file in newest(reports)]


def take_over(folder: Path) -> None:
    """Copy the reports in ``folder`` to the hub, without this checkout's folder and the user's in their texts."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["plugin"] == "user":
            continue
        for one in report["checks"]:
            for name in [name for name, value in one.items() if isinstance(value, str)]:
                one[name] = one[name].replace(f"{ROOT}/", "").replace(f"{Path.home()}/", "~/")
        target = REPORTS / path.name
        target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        read_report(target)


def text(shown: list[tuple[str, dict[str, Any]]]) -> str:
    """Return the page of these rows, and of our own components that have none."""
    components = first_party()
    lines = [HEAD]
    numbers_of: dict[str, int] = {}
    for kind in KINDS:
        lines += [f"\n## {kind.replace('_', ' ').capitalize()}\n"]
        lines += ["| component | distribution | torch | verdict | level | date | hardware | report | |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for file, report in shown:
            if report["kind"] == kind:
                numbers = ", ".join(f"[{_number(numbers_of, note)}]" for note in _notes(report))
                lines.append(f"| {' | '.join(_cells(file, report))} | {numbers} |")
        own = sorted((alias, entry) for (of, alias), entry in components.items() if of == kind)
        reported = {(report["plugin"], report["alias"]) for _, report in shown if report["kind"] == kind}
        without = [(alias, entry) for alias, entry in own if (entry.distribution, alias) not in reported]
        if without:
            aliases = {(kind, alias) for _, alias in reported}
            lines.append("\nOf torchhal's own repository, without a report:\n")
            lines += [
                f"- `{alias}` of {entry.distribution}: {_why_none(entry, components, aliases)}"
                for alias, entry in without
            ]
    lines += ["\n## Notes\n", *(f"{number}. {note}" for note, number in numbers_of.items())]
    return "\n".join([*lines, ""])


def _cells(file: str, report: Mapping[str, Any]) -> Iterator[str]:
    yield _named(report)
    yield f"{report['plugin']} {report['versions'][report['plugin']]}"
    yield report["versions"]["torch"]
    yield report["verdict"] + (f", made before {_listed(ids)} existed" if (ids := made_before(report)) else "")
    yield _level(report)
    yield report["date"][:10]
    on = report["device"].partition(" x ")[0] if " x " in report["device"] else "no device"
    yield _escaped(on if on == "no device" else f"{on}: {report['hardware']}")
    yield f"[JSON](../hub/reports/{file})"


def _level(report: Mapping[str, Any]) -> str:
    """Return the highest level of which a check was made and none failed, and how many passed of each level."""
    reached, shares, sound = "none", [], True
    for level in ("core", "extended"):
        counts = report["levels"].get(level, {"passed": 0, "failed": 0})
        if made := counts["passed"] + counts["failed"]:
            shares.append(f"{level} {counts['passed']} of {made}")
            sound = sound and not counts["failed"]
            reached = level if sound else reached
    return f"{reached} ({', '.join(shares)})" if shares else reached


def _named(report: Mapping[str, Any]) -> str:
    arguments = [name.replace("|", "") for name in report["arguments"]]
    return f"`{report['alias']}`" + (f" with {', '.join(f'`{name}`' for name in arguments)}" if arguments else "")


def _escaped(words: str) -> str:
    """Return ``words`` without what Markdown or HTML would take for markup in a table or a list."""
    for letter in "\\`*_[]|":
        words = words.replace(letter, f"\\{letter}")
    return words.replace("&", "&amp;").replace("<", "&lt;")


def _number(numbers: dict[str, int], note: str) -> int:
    return numbers.setdefault(note, len(numbers) + 1)


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    made = {one["id"] for one in report["checks"]}
    first = {(one["id"], one["outcome"]): _escaped(_first(one["reason"])) for one in report["checks"]}
    failed = {id: words for (id, outcome), words in first.items() if outcome == "failed"}
    for reason, ids in _by_reason({id: words.removeprefix("expected: ").rstrip(".") for id, words in failed.items()}):
        yield f"{', '.join(ids)} {'fails' if len(ids) == 1 else 'fail'}: {reason}."
    skipped = {id: words for (id, outcome), words in first.items() if outcome == "skipped"}
    for begins in ("environment: ", "input: "):
        mine = {id: words.removeprefix(begins).rstrip(".") for id, words in skipped.items() if words.startswith(begins)}
        for reason, ids in _by_reason(mine):
            yield f"{_count(ids)} could not be made: {reason}."
    yield from (f"{_escaped(note).rstrip('.')}." for note in notes(report))
    made |= set(made_before(report))
    if left_out := sorted(one.id for one in checks_for(report["kind"], level="core") if one.id not in made):
        yield f"{_listed(left_out)} left out of the run."


def _by_reason(reasons: dict[str, str]) -> list[tuple[str, list[str]]]:
    grouped: dict[str, list[str]] = {}
    for id, reason in reasons.items():
        grouped.setdefault(reason, []).append(id)
    return list(grouped.items())


def _listed(ids: list[str]) -> str:
    return ", ".join(ids) if len(ids) <= 4 else _count(ids)


def _count(ids: list[str]) -> str:
    return f"{len(ids)} check{'s' if len(ids) > 1 else ''}"


def _why_none(
    entry: RegistryEntry, components: dict[tuple[str, str], RegistryEntry], reported: set[tuple[str, str]]
) -> str:
    """Return the reason why a component has no row: of those of one class with other defaults, one is checked."""
    if reason := WITHOUT_REPORT.get((entry.kind, entry.component.alias)):
        return reason
    for checked in (reported, with_suite()):
        if (entry.kind, entry.component.alias) in checked:
            return "none yet; `make conformance` makes it"
        for (kind, alias), other in components.items():
            same = other.component.target == entry.component.target and kind == entry.kind
            if same and (kind, alias) in checked:
                return f"the class of `{alias}` with other defaults"
    raise LookupError(f"{entry.kind} {entry.component.alias!r}: give it a suite, or a reason in WITHOUT_REPORT")


@cache
def with_suite() -> set[tuple[str, str]]:
    """Return (kind, alias) of each suite in the tests of this repository."""
    modules = [Path(__file__).with_name("test_builtin.py"), *ROOT.glob("plugins/*/tests/test_conformance.py")]
    return {pair for module in modules for pair in _SUITE.findall(module.read_text(encoding="utf-8"))}


def write(folder: Path | None) -> None:
    """Take over the reports in ``folder``, if given, and write the page."""
    if folder is not None:
        take_over(folder)
    PAGE.write_text(text(rows()), encoding="utf-8")


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    except ConfigurationError as refused:
        sys.exit("\n".join(f"refused: {line}" for line in str(refused).splitlines()))
