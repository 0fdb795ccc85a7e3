"""End the runs of a straight script with its program, or with the error that ends it."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

from torchhal.distributed import failures, process


class OpenRun(Protocol):
    """What ends a run, in order or with an error."""

    def end(self) -> None: ...
    def _end_at_exit(self) -> None: ...
    def _close(self, error: BaseException) -> None: ...


_open_runs: list[OpenRun] = []
"""Those that end with the program. Not weak: a function that set one up may have returned."""

_exit_registered_in: int | None = None

_program_ends = False
"""Whether the program has come to its end, so that no one uses what a run leaves."""


def end_with_program(run: OpenRun) -> None:
    """End ``run`` with the program, if nothing ends it before."""
    failures.install_excepthook()
    _open_runs.append(run)
    global _exit_registered_in
    if _exit_registered_in != os.getpid():
        if _exit_registered_in is None:
            failures.closing.append(_close_runs)
        _exit_registered_in = os.getpid()
        atexit.register(_end_at_exit, os.getpid())


def has_ended(run: OpenRun) -> bool:
    """Forget a run; return whether the program goes on behind it."""
    if run in _open_runs:
        _open_runs.remove(run)
    return not _program_ends


def end_open_runs() -> None:
    """End the runs before another one begins: in a notebook, those of cells that failed or are run again."""
    for run in list(_open_runs):
        run.end()


def _close_runs(error: BaseException) -> BaseException:
    """End the open runs with what ends the program; return what that has become."""
    in_order = isinstance(error, SystemExit) and not process.exit_status(error.code)
    for run in list(_open_runs):
        try:
            if in_order:
                run._end_at_exit()
            else:
                run._close(error)
        except BaseException as raised:
            in_order, error = False, raised
    return error


def _end_at_exit(pid: int) -> None:
    if pid != os.getpid():
        return
    global _program_ends
    _program_ends = True
    error = getattr(sys, "last_value", None)  # where another hook than torchhal's has shown it
    try:
        for run in list(_open_runs):
            if error is not None:
                run._close(error)
            else:
                run._end_at_exit()
    except SystemExit as stop:
        process.leave(process.exit_status(stop.code))
    except KeyboardInterrupt:
        process.leave(130)
    except BaseException as failed:
        if failed is not error:
            sys.excepthook(type(failed), failed, failed.__traceback__)
        process.leave(1)
