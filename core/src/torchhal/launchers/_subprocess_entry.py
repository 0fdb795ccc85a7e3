"""Run the user's script in the processes that ``SubprocessScriptLauncher`` starts, and report its end.

Run by path, so that it works wherever torchhal was imported from:
``python .../_subprocess_entry.py script train.py --lr 0.1``. Imports no torch: the script may set variables first that
torch reads.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.path and not getattr(sys.flags, "safe_path", False):
    _here = sys.path.pop(0)  # this folder, whose module names must not shadow others

import faulthandler
import importlib.util
import os
import runpy
import types

if __name__ == "__main__":
    if importlib.util.find_spec("torchhal") is None:  # found by a path that the parent's script adds later
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from torchhal.distributed import failures, process, signals
from torchhal.errors import RankFailedError


def main(arguments: list[str]) -> None:
    """Run ``script PATH``, ``module NAME`` or ``command CODE`` as ``__main__`` and leave with its status."""
    kind, target, rest = arguments[0], arguments[1], arguments[2:]
    rank = int(os.environ["RANK"])
    _prepare(rank)
    code = 0
    try:
        signals.unblock()
        _run(kind, target, rest)
    except BaseException as error:
        code = _end(rank, failures.close_open(error))
    process.finish(code)


def _end(rank: int, error: BaseException) -> int:
    """Show and report what ended the script; return the status."""
    if isinstance(error, SystemExit):
        code = process.exit_status(error.code)
        if isinstance(error.code, str):
            process.write_stderr(f"{error.code}\n")
        if failures.amid_call:
            code = code or 1  # the others are still in the call
        if code:
            failures.send_report(failures.Failure.from_exception(rank, error))
        return code
    sys.last_value = error  # as the interpreter does, for exit handlers
    error.__traceback__ = failures.user_frames(error.__traceback__)
    if not isinstance(error, KeyboardInterrupt):
        _show(rank, error)
    failures.send_report(failures.Failure.from_exception(rank, error))
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _prepare(rank: int) -> None:
    process.open_standard_descriptors()
    if sys.stderr is not None:
        faulthandler.enable()
    if (descriptor := os.environ.get(process.REPORT_FD, "")).isdigit():
        os.set_inheritable(int(descriptor), False)
    parent = int(os.environ[process.PARENT_PID])
    by_kernel = sys.platform == "linux" and os.environ.get(process.PARENT_IS_MAIN) == "1"
    process.die_with_parent(parent, by_kernel=by_kernel)
    if not by_kernel:
        process.watch_parent(parent, "the process that launched this rank")
    why = failures.Failure(rank, "left because another rank failed", secondary=True)
    process.on_leave(lambda: failures.send_report(why))


def _run(kind: str, target: str, rest: list[str]) -> None:
    prepends = not getattr(sys.flags, "safe_path", False)  # what the interpreter itself does for each kind
    if kind == "script":
        sys.argv = [target, *rest]
        if prepends:
            sys.path.insert(0, target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target)))
        runpy.run_path(target, run_name="__main__")
    elif kind == "module":
        sys.argv = [target, *rest]
        if prepends:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        if prepends:
            sys.path.insert(0, "")
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = module
        exec(compile(target, "<string>", "exec"), module.__dict__)


def _show(rank: int, error: BaseException) -> None:
    if failures.was_printed(error):
        return
    if isinstance(error, RankFailedError):
        # The process that launched this one prints the failure, once for all ranks.
        process.write_stderr(f"torchhal: rank {rank} stopped because rank {error.rank} failed.\n")
    else:
        process.write_stderr(f"torchhal: rank {rank}:\n")
        sys.excepthook(type(error), error, error.__traceback__)
    failures.mark_printed(error)


if __name__ == "__main__":
    main(sys.argv[1:])
