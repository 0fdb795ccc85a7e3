"""Check a component against its contract and write the report: ``torchhal conformance``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from pathlib import Path

import torchhal
from torchhal.cli import echo, output_to_stderr, print_json
from torchhal.errors import ConfigurationError
from torchhal.plugin import KINDS
from torchhal_conformance._error_text import with_article
from torchhal_conformance._limits import scaled
from torchhal_conformance._supervised_process import OPTIONS, Request, run_supervised
from torchhal_conformance._tables import read_tables


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


_FILES = ("tables", "report", "html", "junit", "badge", "reports")


def _run(arguments: argparse.Namespace) -> int:
    for name in _FILES:
        if getattr(arguments, name) == "":
            raise ConfigurationError(f"--{name} must be a path (got '')")
    try:
        scaled(1.0)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    named = arguments.kind is not None and arguments.alias is not None
    if (arguments.all is None) != named or (arguments.kind is not None and not named):
        raise ConfigurationError("give KIND and ALIAS, or MODULE:CLASS, of one component, or --all DIST")
    if arguments.reports is not None and arguments.all is None:
        raise ConfigurationError("--reports is for --all; --report FILE writes that of one component")
    if arguments.all is not None:
        return _run_all(arguments)
    request = _request(arguments)
    for name, kind in OPTIONS.items():
        if getattr(request, name) is not None and request.kind != kind:
            raise ConfigurationError(f"--{name} is for a {kind}, not for {with_article(request.kind)}")
    if request.tables is not None:
        read_tables(request.tables)  # an error in it is told before the checks, and seconds before torch is imported
    if arguments.watch:
        return _watch(request, arguments)
    for path in (request.report, request.html, request.junit, request.badge):
        _check_writable(path)
    code = run_supervised(request, show=_print)
    assert code is not None  # nothing stops it
    return code


def _request(arguments: argparse.Namespace) -> Request:
    names = [one.name for one in dataclasses.fields(Request)]
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    if arguments.all is not None:  # each component's
        given |= {"kind": "", "alias": ""}
    for name in ("tables", "report", "html", "junit", "badge"):  # a component may change the folder
        if name in given:
            given[name] = os.path.abspath(given[name])
    return Request(**given)


def _run_all(arguments: argparse.Namespace) -> int:
    one = ("features", "report", "html", "junit", "badge", "json", "watch")
    if given := [f"--{name}" for name in one if getattr(arguments, name)]:
        raise ConfigurationError(f"{', '.join(given)} can't be given with --all: they are for one component")
    with output_to_stderr():
        from torchhal_conformance import _distribution_run as runs

        rows = runs.run_each(arguments.all, Path(arguments.reports or "reports"), _request(arguments), done=_progress)
    _print("\n".join([*runs.table_of(rows), *runs.missing_inputs_of(rows)]))
    return runs.worst([row.code for row in rows])


def _print(text: str) -> None:
    """Print a line of the command's output.

    Raises:
        ConfigurationError: stdout is a file that can't be written, such as one on a full disk.
    """
    try:
        echo(text)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        raise
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # Python flushes once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ConfigurationError(f"stdout can't be written: {error}") from error


def _progress(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def _watch(request: Request, arguments: argparse.Namespace) -> int:
    if given := [f"--{name}" for name in ("report", "html", "junit", "badge", "json") if getattr(arguments, name)]:
        raise ConfigurationError(f"{', '.join(given)} can't be given with --watch: each run would replace it")
    with output_to_stderr():
        from torchhal_conformance import _watch as watching

        paths = watching.sources(request)
    return watching.watch(request, paths)


def _compare(arguments: argparse.Namespace) -> int:
    from torchhal_conformance import _report_difference as differences

    old, new = (differences.read_report(path) for path in (arguments.old, arguments.new))
    found = differences.compare(old, new)
    if arguments.json:
        print_json({"schema": 1, "kind": new["kind"], "alias": new["alias"], **dataclasses.asdict(found)})
    else:
        echo("\n".join(differences.lines_of(found, old, new)))
    return 1 if found.worse else 0


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
