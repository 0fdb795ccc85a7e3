"""Check a component against its contract and write the report: ``torchhal conformance``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, Final

import torchhal
from torchhal.cli import echo, output_to_stderr, print_json
from torchhal.errors import ConfigurationError
from torchhal.plugin import KINDS

CODES: Final = {"conformant": 0, "partial": 0, "failed": 1, "incomplete": 2}
"""Verdict -> exit code."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchhal conformance`` to its parser."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run", help="check one component; exit code 1 if a check fails, 2 if something is to be given"
    )
    run.add_argument("kind", metavar="KIND", nargs="?", choices=KINDS, help=", ".join(KINDS))
    run.add_argument(
        "alias",
        metavar="ALIAS",
        nargs="?",
        help="its alias, or MODULE:CLASS of a class without one",
    )
    run.add_argument("--all", metavar="DIST", help="check every component of this installed distribution instead")
    run.add_argument("--reports", metavar="FOLDER", help="with --all: where the reports go, 'reports' unless given")
    run.add_argument(
        "--watch", action="store_true", help="run the failed checks, or all, again when its source changes"
    )
    run.add_argument("--level", choices=("core", "extended", "provisional"), help="leave out the checks above it")
    run.add_argument(
        "--features", default="", metavar="A,B", help="what the component can do beyond its class's features"
    )
    run.add_argument("--accelerator", default="cpu", metavar="ALIAS", help="what a precision or strategy runs on")
    run.add_argument("--launcher", metavar="COMMAND", help="starts two processes of what follows it: 'srun -n 2'")
    run.add_argument(
        "--tables", metavar="FILE", help="JSON or TOML: the variables that its launcher sets, one table for each rank"
    )
    run.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="makes the model that the checks of a strategy train, if not their own",
    )
    run.add_argument("--data", metavar="MODULE:FACTORY", help="makes the dataset of that model")
    run.add_argument("--check", action="append", default=[], metavar="ID", help="only this; may be given several times")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--report", metavar="FILE", help="write the report, JSON (schema 1)")
    run.add_argument("--html", metavar="FILE", help="write it as a page")
    run.add_argument("--junit", metavar="FILE", help="write it as junit XML")
    run.add_argument("--badge", metavar="FILE", help="write a badge for shields.io, JSON")
    run.add_argument("--verbose", action="store_true", help="print the traceback of an error too")
    run.add_argument("--json", action="store_true", help="print the report")
    run.set_defaults(run=_run)

    comparing = commands.add_parser("compare", help="compare two reports; exit code 1 if something got worse")
    comparing.add_argument("old", metavar="OLD", help="a report, JSON")
    comparing.add_argument("new", metavar="NEW", help="a later report of the same component")
    comparing.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    comparing.set_defaults(run=_compare)

    listing = commands.add_parser("list", help="list the checks of a kind")
    listing.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    listing.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    listing.set_defaults(run=_list)


def _run(arguments: argparse.Namespace) -> int:
    named = arguments.kind is not None and arguments.alias is not None
    if (arguments.all is None) != named or (arguments.kind is not None and not named):
        raise ConfigurationError("give KIND and ALIAS, or MODULE:CLASS, of one component, or --all DIST")
    if arguments.reports is not None and arguments.all is None:
        raise ConfigurationError("--reports is for --all; --report FILE writes that of one component")
    if arguments.all is not None:
        return _run_all(arguments)
    if arguments.watch:
        return _watch(arguments)
    for path in (arguments.report, arguments.html, arguments.junit, arguments.badge):
        _check_writable(path)
    with contextlib.suppress(OSError, ValueError):  # a stderr that is no file
        faulthandler.enable(all_threads=False)  # a component that crashes this process shows amid which check
    with output_to_stderr():
        from torchhal_conformance import _report as reports
        from torchhal_conformance._component_under_test import ComponentUnderTest
        from torchhal_conformance._html import page
        from torchhal_conformance._session import Session
        from torchhal_conformance._suite import check_features, choose
        from torchhal_conformance._tables import read_tables

        features = [name.strip() for name in arguments.features.split(",") if name.strip()]
        launcher = None if arguments.launcher is None else shlex.split(arguments.launcher)
        if arguments.model or arguments.data:
            sys.path.insert(0, os.getcwd())  # as under python -m
        tables: dict[str, Any] = {} if arguments.tables is None else read_tables(arguments.tables)
        component = ComponentUnderTest.of(
            arguments.kind, _target(arguments.alias), features=features, accelerator=arguments.accelerator,
            launcher=launcher, seed=arguments.seed, model=arguments.model, data=arguments.data, **tables,
        )  # fmt: skip
        check_features(component)
        chosen = choose(component, arguments.level, arguments.check or None, "--check")
        with Session(component) as session:
            results = []
            for one in chosen:
                _show(f"{one.id} ...")
                results.append(session.run(one))
            _show("")
        report = reports.build(component, results)
    _write(arguments.report, json.dumps(report, indent=2) + "\n")
    _write(arguments.html, page(report))
    _write(arguments.junit, reports.junit(report))
    _write(arguments.badge, json.dumps(reports.badge(report)) + "\n")
    if arguments.json:
        print_json(report)
    else:
        for result in results:
            if result.outcome == "failed":
                echo(f"{result.verbose_text if arguments.verbose else result.text}\n")
        echo("\n".join(_summary(report)))
    return CODES[report["verdict"]]


def _target(text: str) -> Any:
    """Return an alias as it is, and the class of ``"MODULE:CLASS"``.

    Raises:
        ConfigurationError: there is no such module or class.
    """
    module, colon, name = text.partition(":")
    if not colon:
        return text
    from torchhal_conformance._factory import import_object

    sys.path.insert(0, os.getcwd())  # as under python -m
    try:
        return import_object(module, name, None)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{text!r} must be MODULE:CLASS of a class that can be imported: {error}") from error
    except SystemExit as error:  # or the exit code would be taken for a verdict
        raise ConfigurationError(f"{text!r} can't be imported: it ends the process with {error.code!r}") from error


def _run_all(arguments: argparse.Namespace) -> int:
    one = ("features", "report", "html", "junit", "badge", "json", "watch")
    if given := [f"--{name}" for name in one if getattr(arguments, name)]:
        raise ConfigurationError(f"{', '.join(given)} can't be given with --all: they are for one component")
    with output_to_stderr():
        from torchhal_conformance import _distribution_run as runs

        folder = Path(arguments.reports or "reports")
        options = {name: value for name, value in _options(arguments) if name != "--check"}
        rows = runs.run_each(arguments.all, folder, options, arguments.check)
    echo("\n".join(runs.table_of(rows)))
    return runs.worst([row.code for row in rows])


def _watch(arguments: argparse.Namespace) -> int:
    if given := [f"--{name}" for name in ("report", "html", "junit", "badge", "json") if getattr(arguments, name)]:
        raise ConfigurationError(f"{', '.join(given)} can't be given with --watch: each run would replace it")
    with output_to_stderr():
        from torchhal_conformance import _watch as watching
        from torchhal_conformance._component_under_test import ComponentUnderTest

        component = ComponentUnderTest.of(arguments.kind, _target(arguments.alias))
        paths = watching.sources(component, [arguments.tables] if arguments.tables else [])
    words = [word for name, value in _options(arguments) if name != "--check" for word in (name, value)]
    return watching.watch([arguments.kind, arguments.alias, *words], paths, arguments.check)


def _options(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the options that say what to check and how, with their values, as they were given."""
    names = ("level", "features", "accelerator", "launcher", "tables", "model", "data", "seed")
    given = [(f"--{name}", getattr(arguments, name)) for name in names]
    return [(name, str(value)) for name, value in given if value is not None and value != ""]


def _compare(arguments: argparse.Namespace) -> int:
    from torchhal_conformance import _report_difference as differences

    old, new = (differences.read_report(path) for path in (arguments.old, arguments.new))
    found = differences.compare(old, new)
    if arguments.json:
        print_json({"schema": 1, "kind": new["kind"], "alias": new["alias"], **dataclasses.asdict(found)})
    else:
        echo("\n".join(differences.lines_of(found, old, new)))
    return 1 if found.worse else 0


def _summary(report: dict[str, Any]) -> list[str]:
    from torchhal_conformance._report import missing_inputs

    lines = [
        f"{one['id']} {one['outcome']:<7} {one['seconds']:6.2f} s  {_shown(one)}".rstrip() for one in report["checks"]
    ]
    for level, counts in report["levels"].items():
        lines.append(f"{level}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
    for reason, ids in missing_inputs(report).items():
        lines.append(f"{len(ids)} checks of the core were not made ({', '.join(ids)}): {reason}")
    return [*lines, f"{report['kind']} {report['alias']} is {report['verdict']}"]


def _shown(one: dict[str, Any]) -> str:
    from torchhal_conformance._report import follows

    return f"{follows(one)}{(one['reason'].splitlines() or [''])[0]}"


def _show(text: str) -> None:
    """Print the current check on a terminal; the next text overwrites it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _check_writable(path: str | None) -> None:
    """Raise ConfigurationError for a path that can't be written, before the checks are made; leave no empty file."""
    if path is None:
        return
    new = not os.path.lexists(path)
    try:
        with open(path, "a", encoding="utf-8"):
            pass
        if new:
            os.remove(path)
    except OSError as error:
        raise ConfigurationError(f"{path!r} can't be written: {error}") from error


def _write(path: str | None, text: str) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path!r} can't be written: {error}") from error


def _list(arguments: argparse.Namespace) -> int:
    with output_to_stderr():
        from torchhal_conformance._check import checks_for

        found = checks_for(arguments.kind)
    if arguments.json:
        rows = [
            {
                "id": one.id, "level": one.level, "features": sorted(one.features), "since": one.since,
                "needs": sorted(one.needs), "contract": one.contract, "why": one.why, "fix": one.fix,
            }
            for one in found
        ]  # fmt: skip
        print_json({"schema": 1, "torchhal": torchhal.__version__, "kind": arguments.kind, "checks": rows})
        return 0
    for one in found:
        beyond = f" ({', '.join(sorted(one.features))})" if one.features else ""
        echo(f"{one.id} {one.level}{beyond}: {one.contract}")
    return 0
