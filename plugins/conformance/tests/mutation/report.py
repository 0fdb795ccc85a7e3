"""Compare survivors with the table of explained ones, and print differences and a summary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from mutation.operators import Mutant
from mutation.runner import Verdict

TABLE: Final = Path(__file__).with_name("survivors.json")
REASONS: Final = ("equivalent", "extended", "outside", "hole")
"""Why a mutant survives.

``equivalent``: no caller can tell it from the original. ``outside``: what it changes is the class's own business, of
which the contract says nothing: wording, arguments of its own, a priority, speed. ``extended``: only checks of a
declared feature see it. ``hole``: it breaks the sentence of the contract in ``contract``, and no check fails.
"""


@dataclass(frozen=True)
class Explanation:
    """One row of the table.

    Attributes:
        mutants: an id, or a pattern of ids as in a shell.
        reason: one of :data:`REASONS`.
        why: a sentence.
        change: the change, for an id; ``before -> after``.
        contract: for a hole, the sentence that is broken and where it stands.
    """

    mutants: str
    reason: str
    why: str
    change: str = ""
    contract: str = ""

    @property
    def exact(self) -> bool:
        return not any(letter in self.mutants for letter in "*?")


def load(path: Path = TABLE) -> list[Explanation]:
    """Return the rows of the table, with those for one id before patterns.

    Raises:
        ValueError: a row has an unknown reason, no sentence, or is a hole without its contract.
    """
    rows = [Explanation(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    for row in rows:
        if row.reason not in REASONS or not row.why.endswith(".") or (row.reason == "hole") != bool(row.contract):
            raise ValueError(f"{row.mutants}: a reason of {REASONS}, a sentence, and for a hole the contract's")
    return sorted(rows, key=lambda row: not row.exact)


def explain(mutant: Mutant, table: Iterable[Explanation]) -> Explanation | None:
    """Return the first row that matches the mutant."""
    return next((row for row in table if fnmatchcase(mutant.id, row.mutants)), None)


def describe(mutant: Mutant, source: str) -> str:
    """Return the change in one line."""
    before = " ".join(source[mutant.start : mutant.end].split())
    return f"{before} -> {' '.join(mutant.text.split())}"


def stale(table: Iterable[Explanation], existing: Sequence[Mutant], verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return a line for each row that matches no mutant of its file, or names one that is killed now."""
    files = {one.file for one in existing}
    lines = []
    for row in table:
        if row.mutants.partition(":")[0] not in files:
            continue
        if not any(fnmatchcase(one.id, row.mutants) for one in existing):
            lines.append(f"{row.mutants}: no such mutant any more; remove the row")
        elif row.exact and (found := verdicts.get(row.mutants)) is not None and found.outcome == "killed":
            lines.append(f"{row.mutants}: killed by {found.check} now; remove the row")
    return lines


def summary(mutants: Sequence[Mutant], verdicts: Mapping[str, Verdict], table: Sequence[Explanation]) -> str:
    """Return the table of outcomes by file, with two shares of the killed ones.

    ``all`` is their share of those that are not equivalent, and ``contract`` of those that change something of which
    the contract speaks: without ``outside`` ones too. Those that only an extended check sees count as not killed.
    """
    columns = ("killed", "timeout", *REASONS, "unexplained")
    counts: dict[str, Counter[str]] = {}
    for mutant in mutants:
        verdict = verdicts[mutant.id]
        row = explain(mutant, table)
        outcome = verdict.outcome if verdict.outcome != "survived" else row.reason if row else "unexplained"
        for name in (mutant.file, "all"):
            counts.setdefault(name, Counter())[outcome] += 1
    width = max(map(len, counts))
    lines = [f"{'file':{width}}  mutants  " + "  ".join(columns) + "    all  contract"]
    for name in sorted(counts, key=lambda one: (one == "all", one)):
        count = counts[name]
        total = count.total()
        real = total - count["equivalent"]
        cells = "  ".join(f"{count[column]:{len(column)}}" for column in columns)
        shares = [_share(count["killed"], real), _share(count["killed"], real - count["outside"])]
        lines.append(f"{name:{width}}  {total:7}  {cells}  {shares[0]:>5}  {shares[1]:>8}")
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
