"""Render a report as one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final

from torchhal.report import _facts as facts
from torchhal.report import _plots as plots
from torchhal.report._run_folder import RunFolder

_STYLE: Final = """
:root { color-scheme: light dark; --text: #1d2330; --soft: #5d6675; --line: #d9dde5; --card: #f6f7f9; --back: #fff;
  --bar: #4477aa; --good: #176b2c; --bad: #b3261e; --odd: #7a5b00; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7ee; --soft: #9aa4b5; --line: #363d4a; --card: #1e232c;
  --back: #14181f; --bar: #6f9fd0; --good: #6fcf8a; --bad: #ff8a80; --odd: #e3bd58; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem;
  color: var(--text); background: var(--back); }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0; border-top: 1px solid var(--line);
  font-variant-numeric: tabular-nums; overflow-wrap: break-word; max-width: 34rem; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; white-space: nowrap; }
td { min-width: 12rem; } td.short { min-width: 0; white-space: nowrap; }
tbody th { font-weight: 500; white-space: nowrap; }
.plots { display: grid; margin-bottom: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .6rem; background: var(--card); border-radius: 8px; }
svg { width: 100%; height: auto; display: block; }
.bars { display: grid; grid-template-columns: max-content minmax(4rem, 30rem) max-content; gap: .3rem .8rem;
  align-items: center; font-size: .9rem; }
.bars i { display: block; height: .8rem; min-width: 1px; background: var(--bar); border-radius: 3px; }
.note { color: var(--odd); margin: .3rem 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); } .finished { color: var(--good); } .failed, .killed { color: var(--bad); }
.stopped, .running { color: var(--odd); }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--soft); }
"""


def html_page(runs: list[RunFolder]) -> str:
    """Return the page of one run, or the comparison of several."""
    title = ", ".join(run.label for run in runs)
    body = _one(runs[0]) if len(runs) == 1 else _several(runs)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *body,
            "</body></html>\n",
        ]
    )


def _one(run: RunFolder) -> Iterator[str]:
    yield from _problems(run.problems)
    yield from _overview(run)
    yield from _curves([run])
    yield from _details(run, "h2")


def _several(runs: list[RunFolder]) -> Iterator[str]:
    labels = [run.label for run in runs]
    for run in runs:
        yield from _problems(f"{run.label}: {problem}" for problem in run.problems)
    yield "<h2>Differences</h2>"
    if rows := facts.differences(runs):
        yield _table(["", "", *labels], rows)
    else:
        yield '<p class="soft">No hyperparameter, setting, choice or version that was recorded differs.</p>'
    if rows := facts.final_values(runs):
        yield "<h2>Latest values</h2>"
        yield _table(["", *labels], rows)
    yield from _curves(runs)
    for run in runs:
        yield f"<details><summary>{escape(run.label)}: {escape(run.status())}</summary>"
        yield from _overview(run)
        yield from _details(run, "h3")
        yield "</details>"


def _problems(problems: Iterable[str]) -> Iterator[str]:
    for problem in problems:
        yield f'<p class="note">{escape(problem[:1].upper() + problem[1:])}.</p>'


def _overview(run: RunFolder) -> Iterator[str]:
    (name, status), *rows = facts.overview(run)
    word = escape(status.partition(":")[0].split()[0] if status else "", quote=True)
    word = "killed" if status.startswith("was killed") else word
    yield '<div class="table"><table><tbody>'
    yield f'<tr><th>{escape(name)}</th><td class="{word}">{escape(status)}</td></tr>'
    yield from _rows(rows)
    yield "</tbody></table></div>"


def _curves(runs: list[RunFolder]) -> Iterator[str]:
    if not any(run.curves for run in runs):
        return
    yield "<h2>Curves</h2>"
    if plots.is_available():
        yield '<div class="plots">'
        count = 0
        for _, svg in plots.plots(runs):
            count += 1
            yield f"<figure>{svg}</figure>"
        yield "</div>"
        if count == plots.MAX_PLOTS:
            yield f'<p class="soft">The first {count} plots; all metrics are in the table.</p>'
    else:
        yield (
            '<p class="note">The curves are not drawn: matplotlib is not installed '
            "(pip install &#39;torchhal[report]&#39;).</p>"
        )
    if len(runs) == 1:
        yield _table(["metric", "latest", "least", "greatest", "values", "not finite"], facts.metrics(runs[0]))


def _details(run: RunFolder, level: str) -> Iterator[str]:
    def section(title: str, content: str | None) -> Iterator[str]:
        if content is not None:
            yield f"<{level}>{title}</{level}>"
            yield content

    def table(head: Sequence[str], rows: facts.Rows) -> str | None:
        return _table(head, rows) if rows else None

    yield from section("Hyperparameters", table([], list(facts.named(run, "hyperparameters").items())))
    yield from section("Plan", table(["", "choice", "reason"], facts.plan(run)))
    yield from section("Time", _bars(facts.phases(run)))
    heads = ["rank", "device", "peak of the device", "peak of the process"]
    yield from section("Memory", table(heads, facts.memory(run)))
    yield from section("Checkpoints", table(["name", "size", "written", "score", ""], facts.checkpoints(run)))
    heads = ["", "began", "ended", "from step", "to step", "how it ended"]
    yield from section("Fits, interruptions and resumes", table(heads, facts.history(run)))
    yield from section("Versions", table([], list(facts.named(run, "versions").items())))
    if settings := facts.named(run, "settings"):
        yield "<details><summary>The Trainer's settings</summary>"
        yield _table([], list(settings.items()))
        yield "</details>"


def _bars(found: list[tuple[str, float]]) -> str | None:
    total = sum(seconds for _, seconds in found)
    if not total:
        return None
    cells = [
        f'<span>{escape(name)}</span><i style="width:{100 * seconds / found[0][1]:.2f}%"></i>'
        f"<span>{facts.duration(seconds)}, {100 * seconds / total:.1f} %</span>"
        for name, seconds in found
    ]
    return f'<div class="bars">{"".join(cells)}</div>'


def _table(head: Sequence[str], rows: facts.Rows) -> str:
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    return f'<div class="table"><table>{top}<tbody>{"".join(_rows(rows))}</tbody></table></div>'


def _rows(rows: facts.Rows) -> Iterator[str]:
    for first, *rest in rows:
        yield f"<tr><th>{escape(first)}</th>{''.join(map(_cell, rest))}</tr>"


def _cell(text: str) -> str:
    short = ' class="short"' if len(text) <= 24 else ""
    return f"<td{short}>{escape(text)}</td>"
