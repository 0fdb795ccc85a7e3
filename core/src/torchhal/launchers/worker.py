"""Run a function in a worker of ``MultiprocessingLauncher``, with the parts that every launcher of workers needs.

Imports torch only when the variables are set.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from torchhal.distributed import failures, process, signals
from torchhal.distributed.failures import Failure

if TYPE_CHECKING:
    from torchhal.launchers.serialization import AnonymousFile

__all__ = [
    "failed",
    "perform",
]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments."""

DONE = ("done",)

INTERRUPT = ("interrupt",)
"""Message that the supervisor sends when it receives SIGINT."""

MAX_ERROR = 1 << 20
"""Largest pickled exception that is sent with its text."""


@dataclass
class Assignment:
    """The data a worker gets when it is started. ``call`` is None after a fork: it has the function."""

    rank: int
    is_result_rank: bool
    variables: dict[str, str]
    start_method: str
    supervisor_pid: int
    supervisor_is_main: bool
    settings: dict[str, Any] | None
    threads: int
    payload: AnonymousFile | None
    result: AnonymousFile
    call: Call | None
    others: list[Connection]
    """Ends of pipes that a fork inherits and must not keep open."""


def run(assignment: Assignment, connection: Connection) -> None:
    """Run as rank ``assignment.rank`` and leave; never returns."""
    rank = assignment.rank
    code = 1
    try:
        _prepare(assignment, connection)
        code = _work(assignment, connection)
    except BaseException as error:
        try:
            connection.send(failed(rank, error))
        except OSError:
            process.write_stderr(Failure.from_exception(rank, error).text())
        if isinstance(error, SystemExit):
            code = process.exit_status(error.code)
        elif isinstance(error, KeyboardInterrupt):
            code = 130
    # The message is in the pipe; the process ends like every process that a launcher owns.
    process.finish(code)


def _prepare(assignment: Assignment, connection: Connection) -> None:
    process.open_standard_descriptors()
    if sys.stderr is not None:
        faulthandler.enable()
    for other in assignment.others:
        other.close()
    # The supervisor's handlers are not a worker's: after a fork they would run in it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signals.unblock()
    if assignment.start_method != "spawn":
        # A fork has its parent's exit handlers: their files and connections are not a worker's to close.
        process.keep_exit_handlers()
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    failures.supervised = True
    failures.sender = lambda failure: connection.send(("failed", failure.to_json(), None))
    if assignment.start_method != "forkserver":
        process.die_with_parent(assignment.supervisor_pid, by_kernel=assignment.supervisor_is_main)
    connection.send(("ready",))
    port = connection.recv()
    process.without_external(os.environ)
    os.environ.update(assignment.variables)
    os.environ["MASTER_PORT"] = str(port)
    threading.Thread(target=_watch_supervisor, args=(connection,), name="torchhal-supervisor", daemon=True).start()


def _watch_supervisor(connection: Connection) -> None:
    """Forward the supervisor's reports of other ranks, and its Ctrl-C.

    Exit when its end of the pipe closes: the supervisor has ended.
    """
    try:
        while True:
            message = connection.recv()
            if message == INTERRUPT:
                signals.interrupt()
                continue
            failure = Failure.from_json(message)
            if "torchhal.distributed._rank_monitor" in sys.modules:
                for watch in sys.modules["torchhal.distributed._rank_monitor"].active_watches():
                    watch.report_for(failure)
    except (EOFError, OSError):
        process.leave(1)


def _work(assignment: Assignment, connection: Connection) -> int:
    payload, call = assignment.payload, assignment.call

    def read() -> Call:
        if call is not None:
            return call
        assert payload is not None
        _, function, args, kwargs = payload.read()
        payload.close()
        return function, args, kwargs

    write = assignment.result.write if assignment.is_result_rank else None
    message = perform(read, write, settings=assignment.settings, threads=assignment.threads)
    connection.send(message)
    return 0 if message == DONE else 1


def perform(
    read: Callable[[], Call],
    write: Callable[[Any], object] | None,
    *,
    settings: dict[str, Any] | None,
    threads: int | None,
) -> tuple[Any, ...]:
    """Run the call that ``read`` gives, and give its result to ``write``: what ``WorkerOutcomes`` takes.

    Exceptions of the call itself propagate; :func:`failed` turns them into a message.
    """
    import torch

    if settings is not None:
        from torchhal.launchers.serialization import apply_settings

        apply_settings(settings)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        function, args, kwargs = read()
    except (Exception, SystemExit) as error:  # which a module may raise that is imported; a Ctrl-C amid it is one
        return "unreadable", f"{type(error).__name__}: {error}"
    value = function(*args, **kwargs)
    if write is not None:
        try:
            write(value)
        except Exception as error:
            return "unsendable", f"{type(value).__qualname__}: {type(error).__name__}: {error}"
    return DONE


def failed(rank: int, error: BaseException, dumps: Callable[[BaseException], bytes] = pickle.dumps) -> tuple[Any, ...]:
    """Return the message that rank ``rank`` ends by ``error``, with the error itself where that survives pickling."""
    data: bytes | None
    try:
        data = dumps(error)
        pickle.loads(data)  # not every exception can be unpickled
        data = data if len(data) <= MAX_ERROR else None
    except Exception:
        data = None
    return "failed", Failure.from_exception(rank, error).to_json(), data
