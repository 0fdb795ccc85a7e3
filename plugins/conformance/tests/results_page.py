"""Generate docs/reference/conformance-results.md: the results of each component in this repository.

``python plugins/conformance/tests/results_page.py [FOLDER]`` takes over the reports in FOLDER, as the suites write them
with ``TORCHHAL_CONFORMANCE_REPORTS=FOLDER``, and writes the page anew; results without a new report stay. ``make
conformance`` makes all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchhal import registry
from torchhal.plugin import KINDS
from torchhal.registry._discovery import CORE
from torchhal.registry._entry import RegistryEntry
from torchhal_conformance._check import CHECKS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "conformance-results.md"
DATA = PAGE.with_suffix(".json")
HEAD = """# Conformance of the components in this repository

<!-- made by plugins/conformance/tests/results_page.py from the suites' reports -->

Each row is one run of [the conformance kit](conformance.md), in the tests of the component. "core" and "extended"
count the checks that passed of those that were made; a check that says nothing about a component, or is about a feature
that it doesn't declare, is not made. `partial`: the machine of the run, which has no accelerator, could not make some.

`sim` is a simulated device; Gaudi, the IPU and Bagua are the stubs of `plugins/*/stub`, and XLA is its own CPU device.
Their rows say that the plugin keeps its contract on these, not what the hardware does.
"""

_SOME = "no report, which needs all checks: passes"
_ASKS = f"{_SOME} all but ENV-06, which takes away the variables that say what the ranks would ask each other"
WITHOUT_REPORT = {
    ("precision", "ipu-16-mixed"): "works within compiled steps only; the kit checks precisions by torch's operators",
    ("cluster_environment", "env"): _ASKS,
    ("cluster_environment", "flux"): f"{_SOME} those for which no rank of Flux asks the others who shares its host",
    ("cluster_environment", "kubeflow"): f"{_SOME} those that don't ask for two processes on a node; a pod has one",
    ("cluster_environment", "lsf"): _ASKS,
    ("cluster_environment", "mpich"): _ASKS,
    ("cluster_environment", "openmpi"): _ASKS,
    ("cluster_environment", "sagemaker"): f"{_SOME} all but ENV-06, which is for who didn't start the processes itself",
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


def result(report: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the fields of a report that the page shows."""
    checks = report["checks"]
    made = {one["id"] for one in checks}
    kinds = [one for one in CHECKS.values() if report["kind"] in one.kinds and one.level == "core"]
    return {
        "kind": report["kind"],
        "alias": report["alias"],
        "plugin": report["plugin"],
        "on": report["device"].partition(" x ")[0] if " x " in report["device"] else "no device",
        "file": file,
        "versions": report["versions"],
        "verdict": report["verdict"],
        "levels": report["levels"],
        "features": report["features"],
        "arguments": report.get("arguments", {}),
        "failed": {one["id"]: _first(one["reason"]) for one in checks if one["outcome"] == "failed"},
        "environment": {
            one["id"]: _first(one["reason"]).removeprefix("environment: ")
            for one in checks
            if one["outcome"] == "skipped" and one["reason"].startswith("environment:")
        },
        "left out": sorted(one.id for one in kinds if one.id not in made),
    }


def _first(reason: str) -> str:
    return (reason.splitlines() or [""])[0]


def read(folder: Path | None) -> list[dict[str, Any]]:
    """Return the known results, those of ``folder`` in the place of older ones."""
    known = {one["file"]: one for one in json.loads(DATA.read_text(encoding="utf-8"))} if DATA.exists() else {}
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["plugin"] != "user":
            known[path.name] = result(report, path.name)
    return [known[name] for name in sorted(known)]


def text(results: list[dict[str, Any]]) -> str:
    components = first_party()
    lines = [HEAD]
    notes: dict[str, int] = {}
    for kind in KINDS:
        lines += [f"\n## {kind.replace('_', ' ').capitalize()}\n"]
        lines += ["| component | of | checked on | core | extended | verdict | |", "|---|---|---|---|---|---|---|"]
        for (_, alias), entry in sorted((key, entry) for key, entry in components.items() if key[0] == kind):
            mine = [one for one in results if (one["kind"], one["alias"]) == (kind, alias)]
            for one in mine:
                numbers = "".join(f"[{_number(notes, note)}]" for note in _notes(one))
                lines.append(
                    f"| {_named(one)} | {entry.distribution} | {one['on']} | {_share(one, 'core')} | "
                    f"{_share(one, 'extended')} | {one['verdict']} | {numbers} |"
                )
            if not mine:
                lines.append(f"| `{alias}` | {entry.distribution} | | | | | {_why_none(entry, components, results)} |")
    lines += ["\n## Notes\n", *(f"{number}. {note}" for note, number in notes.items())]
    versions = {name: sorted({one["versions"][name] for one in results}) for name in ("torchhal", "torch", "python")}
    told = "; ".join(f"{name} {', '.join(values)}" for name, values in versions.items())
    return "\n".join([*lines, f"\nVersions: {told}.\n"])


def _named(one: dict[str, Any]) -> str:
    arguments = one["arguments"]
    return f"`{one['alias']}`" + (f" with {', '.join(f'`{name}`' for name in arguments)}" if arguments else "")


def _number(notes: dict[str, int], note: str) -> int:
    return notes.setdefault(note, len(notes) + 1)


def _share(one: dict[str, Any], level: str) -> str:
    counts = one["levels"].get(level, {"passed": 0, "failed": 0})
    made = counts["passed"] + counts["failed"]
    return f"{counts['passed']} of {made}" if made else ""


def _notes(one: dict[str, Any]) -> Iterator[str]:
    failed = {id: reason.removeprefix("expected: ").rstrip(".") for id, reason in one["failed"].items()}
    for reason, ids in _by_reason(failed):
        yield f"{', '.join(ids)} {'fails' if len(ids) == 1 else 'fail'}: {reason}."
    for reason, ids in _by_reason(one["environment"]):
        yield f"{_count(ids)} could not be made: {reason}."
    if left_out := one["left out"]:
        named = ", ".join(left_out) if len(left_out) <= 4 else _count(left_out)
        yield f"{named} left out of the run: see the component's tests/test_conformance.py."


def _by_reason(reasons: dict[str, str]) -> list[tuple[str, list[str]]]:
    grouped: dict[str, list[str]] = {}
    for id, reason in reasons.items():
        grouped.setdefault(reason, []).append(id)
    return list(grouped.items())


def _count(ids: list[str]) -> str:
    return f"{len(ids)} check{'s' if len(ids) > 1 else ''}"


def _why_none(
    entry: RegistryEntry, components: dict[tuple[str, str], RegistryEntry], results: list[dict[str, Any]]
) -> str:
    """Return the reason why a component has no row: of those of one class with other defaults, one is checked."""
    if reason := WITHOUT_REPORT.get((entry.kind, entry.component.alias)):
        return reason
    checked = {(one["kind"], one["alias"]) for one in results}
    for (kind, alias), other in components.items():
        same = other.component.target == entry.component.target and kind == entry.kind
        if same and (kind, alias) in checked:
            return f"the class of `{alias}` with other defaults"
    raise LookupError(f"{entry.kind} {entry.component.alias!r}: give it a suite, or a reason in WITHOUT_REPORT")


def write(folder: Path | None) -> None:
    results = read(folder)
    DATA.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(text(results), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
