"""Mutate the core's components and list the mutants that the kit doesn't kill.

``python plugins/conformance/tests/mutation --help`` shows how to choose some of them.

Exits with 1 where a survivor is not explained in ``survivors.json``, or a row there is out of date.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutation import report
from mutation.operators import OPERATORS, Mutant, mutants_of
from mutation.reference import ELSEWHERE, KINDS, read_sources
from mutation.runner import CACHE, Runner, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    given = _parser().parse_args(arguments)
    # A shell starts what runs in the background with SIGINT ignored, and so would be the ranks of SYS-05.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    table = report.load()
    problems: list[str] = []
    for kind in given.kind or KINDS:
        problems += _run_kind(kind, given, table)
    for line in problems:
        print(f"! {line}")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mutation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="mutate this kind; default: all")
    parser.add_argument("--file", action="append", help="mutate this file, such as precision/mixed.py")
    parser.add_argument("--operator", action="append", choices=OPERATORS, help="make these changes alone")
    parser.add_argument("--only", action="append", metavar="ID", help="run this mutant, with the checks' messages")
    parser.add_argument("--sample", nargs=2, type=int, metavar=("SEED", "N"), help="run N mutants of each kind")
    parser.add_argument("--limit", type=int, metavar="N", help="run the first N mutants of each kind")
    parser.add_argument("--processes", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--level", default="core", choices=("core", "extended"), help="level of the checks")
    parser.add_argument("--fresh", action="store_true", help="don't use results of earlier runs")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run none")
    parser.add_argument("--json", metavar="FILE", help="write verdicts and changes to a file; of one kind")
    return parser


def existing_mutants(kind: str) -> list[Mutant]:
    """Return every mutant of one kind, but for functions that no component calls."""
    return [
        one
        for file, source in read_sources(kind).items()
        for one in mutants_of(source, file)
        if f"{one.file}:{one.function}" not in ELSEWHERE
    ]


def choose(mutants: Sequence[Mutant], given: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the arguments ask for."""
    chosen = [
        one
        for one in mutants
        if (not given.file or one.file in given.file)
        and (not given.operator or one.operator in given.operator)
        and (not given.only or one.id in given.only)
    ]
    if given.sample:
        seed, number = given.sample
        sampled = set(random.Random(seed).sample([one.id for one in chosen], min(number, len(chosen))))
        chosen = [one for one in chosen if one.id in sampled]
    return chosen[: given.limit]


def _run_kind(kind: str, given: argparse.Namespace, table: Sequence[report.Explanation]) -> list[str]:
    """Run the chosen mutants of one kind, print what became of them, and return the problems."""
    with Runner(kind, level=given.level, cache=None if given.fresh else CACHE) as runner:
        existing = existing_mutants(kind)
        chosen = choose(existing, given)
        if given.list or not chosen:
            for one in chosen:
                print(f"{one.id}  line {one.line}: {report.describe(one, runner.sources[one.file])}")
            return []
        control = runner.control()
        if control.failed:
            return [f"{kind}: the unchanged {carrier} fails {id}: {reason}" for carrier, id, reason in control.failed]
        finished: list[str] = []

        def done(mutant: Mutant, verdict: Verdict) -> None:
            finished.append(mutant.id)
            by = f" by {verdict.check} of {verdict.carrier}" if verdict.outcome == "killed" else ""
            hang = " (HANG)" if verdict.hang else ""
            print(f"[{len(finished)}/{len(chosen)}] {verdict.outcome}{by}{hang} {mutant.id}", flush=True)
            if given.only:
                print(verdict.reason)

        verdicts = runner.run(chosen, control, processes=given.processes, done=done)
        _print_survivors(chosen, verdicts, runner.sources, table)
        print(f"\n{kind}\n{report.summary(chosen, verdicts, table)}\n")
        if given.json:
            _write_json(Path(given.json), chosen, verdicts, runner.sources)
    survivors = [one for one in chosen if verdicts[one.id].outcome != "killed"]
    unexplained = [one.id for one in survivors if given.level == "core" and report.explain(one, table) is None]
    lines = [f"{id}: it survives, and {report.TABLE.name} doesn't say why" for id in unexplained]
    return [*lines, *(report.stale(table, existing, verdicts) if given.level == "core" else ())]


def _print_survivors(
    chosen: Sequence[Mutant],
    verdicts: dict[str, Verdict],
    sources: dict[str, str],
    table: Sequence[report.Explanation],
) -> None:
    for mutant in chosen:
        verdict = verdicts[mutant.id]
        if verdict.outcome == "killed":
            continue
        row = report.explain(mutant, table)
        print(f"\n-- {verdict.outcome}: {mutant.id}, whose statement {verdict.reached} checks run")
        print(f"   {row.reason}: {row.why}" if row else "   not explained")
        if verdict.skipped:
            print(f"   no longer made: {', '.join(verdict.skipped)}")
        if verdict.outcome == "timeout":
            print(f"   the last check that ended: {verdict.check}")
        print(mutant.diff(sources[mutant.file]))


_TOLD = ("outcome", "check", "carrier", "hang", "reached", "skipped")


def _write_json(path: Path, chosen: Sequence[Mutant], verdicts: dict[str, Verdict], sources: dict[str, str]) -> None:
    rows = [
        {
            "id": one.id, "line": one.line, "change": report.describe(one, sources[one.file]),
            **{name: getattr(verdicts[one.id], name) for name in _TOLD},
        }
        for one in chosen
    ]  # fmt: skip
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
