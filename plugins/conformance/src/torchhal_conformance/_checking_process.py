"""Make the checks of one component, and send each result to the process that supervises this one."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from os import _exit  # as it is before a check takes it away from components
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchhal.errors import ConfigurationError, TorchhalError, UnknownAliasError
from torchhal_conformance._subprocesses import kill_all, processes_with
from torchhal_conformance._supervised_process import STACK, result_line

if TYPE_CHECKING:
    from torchhal_conformance._check import Check
    from torchhal_conformance._component_under_test import ComponentUnderTest
    from torchhal_conformance._session import Result

CODES: Final = {"conformant": 0, "partial": 0, "failed": 1, "incomplete": 2}
"""Verdict -> exit code."""
MAX_HANGS: Final = 5
"""After so many checks that hung the rest is not made: each takes as long as its limit."""

Send = Callable[..., None]
"""Sends an event to the supervising process."""


def main() -> None:
    """Make the checks that the first line of stdin names, and end this process.

    Events are lines of JSON at stdout: ``imported`` when the component's class is loaded, ``begin`` and ``limit``
    before a check, ``end`` after it, ``print`` for a line of the command's output, ``error`` for an argument that can't
    be, ``code`` for the exit code.
    """
    request, own = json.loads(sys.stdin.readline()), os.getpid()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    supervisor = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # a component that reads gets nothing
    os.dup2(2, 1)  # and what it prints is no event
    folder = request["folder"]
    threading.Thread(target=_exit_with, args=(supervisor, folder), daemon=True, name="torchhal-conformance-end").start()
    faulthandler.enable(all_threads=False)  # a component that crashes this process shows amid which check
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, open(Path(folder, STACK), "w", encoding="utf-8"))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # "&" in a script ignores it: checks send it to ranks
    begun = False  # the supervising process goes on where this one ended

    def send(**event: Any) -> None:
        nonlocal begun
        if os.getpid() != own:  # a fork that a component has made, and that came back to the kit
            _exit(1)
        begun = begun or "begin" in event or ("imported" in event and request["instances"])
        events.write(json.dumps(event) + "\n")

    try:
        send(code=_run(request, send))
    except TorchhalError as error:
        # the command's error line joins the lines of others by spaces: each of these is a sentence
        send(error=("; " if isinstance(error, UnknownAliasError) else "\n").join(str(error).splitlines()))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the component has raised it
        traceback.print_exc()
        if begun:
            _exit(1)
        from torchhal_conformance._error_text import text_of

        named = f"{request['kind']} {request['alias']!r}"
        send(error=f"{named} can't be checked: it raised {type(error).__name__}: {text_of(error)}")


def _exit_with(supervisor: int, folder: str) -> None:
    """Wait for the end of the supervising process, and end this one then, with what it has left."""
    with contextlib.suppress(OSError):
        os.read(supervisor, 1)  # it sends nothing after the request
    kill_all(set(processes_with("TMPDIR", folder)) - {os.getpid()})
    shutil.rmtree(folder, ignore_errors=True)
    _exit(1)


def _run(request: dict[str, Any], send: Send) -> int:
    from torchhal_conformance import _report as reports
    from torchhal_conformance._html import page
    from torchhal_conformance._suite import check_features, choose

    component = _component(request)
    check_features(component)
    component.makes_instances = request["instances"]
    with contextlib.suppress(Exception):  # the checks say what is wrong with it
        component.entry.load()
    send(imported=True)
    chosen = choose(component, request["level"], request["check"] or None, "--check")
    results = _results(component, chosen, request["results"], send, quiet=request["json"])
    report = reports.build(component, results)
    for name, text in (
        ("report", json.dumps(report, indent=2) + "\n"), ("html", page(report)), ("junit", reports.junit(report)),
        ("badge", json.dumps(reports.badge(report)) + "\n"),
    ):  # fmt: skip
        _write(request[name], text)
    if request["json"]:
        send(print=json.dumps(report, indent=2))
    else:
        failed = [result for result in results if result.outcome == "failed"]
        texts = [f"\n{result.verbose_text if request['verbose'] else result.text}" for result in failed]
        send(print="\n".join([*texts, *([""] if texts else []), *reports.summary(report)]))
    return CODES[report["verdict"]]


def _component(request: dict[str, Any]) -> ComponentUnderTest:
    from torchhal_conformance._component_under_test import ComponentUnderTest
    from torchhal_conformance._tables import read_tables

    if ":" in request["alias"] or request["model"] or request["data"]:
        sys.path.insert(0, os.getcwd())  # as under python -m
    return ComponentUnderTest.of(
        request["kind"], _target(request["alias"]), accelerator=request["accelerator"], seed=request["seed"],
        features=[name.strip() for name in request["features"].split(",") if name.strip()],
        launcher=None if request["launcher"] is None else shlex.split(request["launcher"]),
        model=request["model"], data=request["data"],
        tables=() if request["tables"] is None else read_tables(request["tables"]),
    )  # fmt: skip


def _target(text: str) -> Any:
    """Return an alias as it is, and the class of ``"MODULE:CLASS"``.

    Raises:
        ConfigurationError: there is no such module or class.
    """
    module, colon, name = text.partition(":")
    if not colon:
        return text
    from torchhal_conformance._factory import import_object

    try:
        return import_object(module, name, None)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{text!r} must be MODULE:CLASS of a class that can be imported: {error}") from error
    except SystemExit as error:
        raise ConfigurationError(f"{text!r} can't be imported: it ends the process with {error.code!r}") from error


def _results(
    component: ComponentUnderTest, chosen: Sequence[Check], known: Sequence[dict[str, Any]], send: Send, *, quiet: bool
) -> list[Result]:
    """Make the checks of ``chosen`` that have no result among ``known``, of processes that died; return all results."""
    from torchhal_conformance._session import NOT_MADE, Result, Session

    results = {}
    with Session(component, interruptible=False) as session:
        for one in known:
            results[one["check"]] = session.restore_result(one)
        for check in chosen:
            if check.id in results:
                continue
            send(begin=check.id, limit=session.limit(check))
            hung = [id for id, result in results.items() if result.hung]
            if len(hung) < MAX_HANGS:
                result = session.run(check)
            else:
                result = Result(check, "skipped", f"{NOT_MADE} {len(hung)} checks before it hung ({', '.join(hung)})")
            results[check.id] = result
            send(end=result.as_dict())
            if not quiet:
                send(print=result_line(check.id, result.outcome, result.seconds, result.told))
    return [results[check.id] for check in chosen]


def _write(path: str | None, text: str) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path!r} can't be written: {error}") from error
