"""Write a report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from torchhal._text_table import format_table
from torchhal.report import _facts as facts
from torchhal.report._run_folder import RunFolder

_WIDTH = 60


def text_summary(runs: list[RunFolder]) -> str:
    """Return a short summary of one run, or the differences of several, as lines."""
    return "\n".join(_one(runs[0]) if len(runs) == 1 else _several(runs))


def _one(run: RunFolder) -> Iterator[str]:
    rows: facts.Rows
    yield from format_table(facts.overview(run))
    if rows := facts.metrics(run):
        yield from _table("metrics", ("name", "latest", "least", "greatest", "values", "not finite"), rows)
    rows = list(facts.named(run, "hyperparameters").items())
    if rows:
        yield from _table("hyperparameters", (), rows)
    if rows := facts.plan(run):
        yield from _table("plan", (), rows)
    if found := facts.phases(run):
        total = sum(seconds for _, seconds in found) or 1
        yield from _table(
            "time", (), [(name, facts.duration(value), f"{100 * value / total:.0f} %") for name, value in found]
        )
    if rows := facts.memory(run):
        yield from _table("peak memory", ("rank", "device", "of the device", "of the process"), rows)
    if rows := facts.checkpoints(run):
        yield from _table("checkpoints", ("name", "size", "written", "score", ""), rows)
    if len(run.fits) > 1:
        yield from _table("fits", ("", "began", "ended", "from step", "to step", "status"), facts.history(run))
    for problem in run.problems:
        yield f"note: {problem}"


def _several(runs: list[RunFolder]) -> Iterator[str]:
    labels = tuple(run.label for run in runs)
    yield from format_table([(run.label, run.status()) for run in runs])
    rows = facts.differences(runs)
    yield from _table("differences", ("", "", *labels), rows or [("none recorded", *[""] * (len(runs) + 1))])
    if rows := facts.final_values(runs):
        yield from _table("latest values", ("", *labels), rows)
    for run in runs:
        yield from (f"note: {run.label}: {problem}" for problem in run.problems)


def _table(title: str, head: tuple[str, ...], rows: facts.Rows) -> Iterator[str]:
    yield ""
    yield title
    for line in format_table([head, *rows] if head else rows, max_width=_WIDTH):
        yield f"  {line}"
