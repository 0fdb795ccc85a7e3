"""Report failures of ranks between processes and to the user, and end a process with the code of a signal.

Imports no torch.
"""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import signal
import sys
import traceback as _traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from torchhal.distributed.process import REPORT_FD, exit_status, is_signal_status, write_stderr
from torchhal.distributed.signals import AGREED, StopRequested, is_agreed, is_orderly
from torchhal.errors import RankFailedError, TorchhalError, message_of

__all__ = [
    "Failure",
    "exit_for_signal",
    "sender",
    "supervised",
]

_TORCHHAL = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LAUNCHING = tuple(os.path.join(_TORCHHAL, package, "") for package in ("distributed", "launchers"))

MAX_TEXT = 7_000
"""Longest traceback that travels: as JSON it must fit a pipe's 64 KiB."""

STILL_HERE = "is still here"
"""Beginning of the message of a rank that hung after another had failed."""

# Messages of process groups, stores and sockets when a peer is gone. Kept generic: the wording differs by backend.
_CLOSED = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|enforce(notmet| fail)|connectfullmesh"
    r"|remote process exited|communicator (was )?(aborted|failed)|failed to (recv|send)|recvvalue failed"
    r"|remote (peer|rank).*(exited|gone)|process group.*(aborted|destroyed)",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(
    r"timed out waiting \d+ ?ms|wait timeout|socket timeout|(collective|watchdog|barrier|store|operation|socket)"
    r".{0,80}(timed out|timeout)|failed to pass monitoredbarrier|application timeout caused pair closure",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """The failure of one rank. ``secondary``: it stopped only because another rank had failed before."""

    rank: int
    message: str
    traceback: str = ""
    printed: bool = False
    secondary: bool = False
    exit_code: int | None = None
    """Argument of ``sys.exit``, as a process status."""
    signal: int = 0
    """The signal that ended the process."""
    transport: bool = False
    """A peer was gone or unresponsive: a consequence."""
    root: tuple[int, str] | None = None
    """Of a secondary failure, the rank that failed first and its failure as far as known."""
    stop_signal: int = 0
    """The signal on which it left at once, before training or by KeyboardInterrupt: not a failure, and the others leave
    on it too."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode(errors="replace")

    @classmethod
    def from_json(cls, data: bytes) -> Failure:
        fields = json.loads(data)
        root = fields.pop("root", None)
        return cls(**fields, root=None if root is None else (int(root[0]), str(root[1])))

    @classmethod
    def from_signal(cls, rank: int, signum: int) -> Failure:
        """Return the failure of a rank that left on a signal before the others."""
        name = signal.Signals(signum).name
        return cls(rank, f"left on {name}", exit_code=128 + signum, stop_signal=signum)

    @classmethod
    def from_exception(cls, rank: int, error: BaseException, *, printed: bool = False) -> Failure:
        text = "".join(_traceback.format_exception(type(error), error, user_frames(error.__traceback__)))
        return cls(
            rank=rank,
            message=summary(error),
            traceback=text[-MAX_TEXT:],
            printed=printed or was_printed(error),
            secondary=isinstance(error, RankFailedError),
            exit_code=_exit_code(error),
            stop_signal=_stop_signal(error),
            transport=is_transport_error(error),
            root=(error.rank, message_of(error)[-MAX_TEXT:]) if isinstance(error, RankFailedError) else None,
        )

    @property
    def stopped(self) -> bool:
        """True if the process ended because a signal requested it."""
        return self.signal in (2, 15) or is_signal_status(self.exit_code or 0)

    @property
    def aborted(self) -> bool:
        """True if C++ code aborted, as a backend does when ranks send each other something unexpected."""
        return self.signal == getattr(signal, "SIGABRT", None)

    @property
    def weight(self) -> int:
        """Of several failures the one with the lowest weight is the cause; of equals the first."""
        if self.secondary:
            return 4
        if self.transport:
            return 3
        return 2 if self.stopped else 1

    def text(self) -> str:
        """Return the message and, below it, the rank's own traceback."""
        head = f"rank {self.rank} {self.message}"
        return f"{head}\n\n{self.traceback.rstrip()}\n" if self.traceback else head

    def error(self) -> RankFailedError:
        """Return the error for the other ranks and for the launching process."""
        if self.root is not None:  # it failed on another node, which this launcher doesn't supervise
            return RankFailedError(self.root[1], rank=self.root[0])
        error = RankFailedError(self.text(), rank=self.rank, traceback=self.traceback, stop_signal=self.stop_signal)
        if self.printed:
            mark_printed(error)
        return error


def summary(error: BaseException) -> str:
    """Return one line that follows "rank 1 "."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted (KeyboardInterrupt)"
    text = message_of(error).strip().splitlines()
    return f"failed: {type(error).__name__}{': ' + text[0][:300] if text else ''}"


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that lead from a process's start to the user's code."""
    first = trace
    while first is not None:
        name = first.tb_frame.f_code.co_filename
        if not (name.startswith(_LAUNCHING) or name in ("<frozen runpy>", runpy.__file__)):
            return first
        first = first.tb_next
    return trace


def _exit_code(error: BaseException) -> int | None:
    if isinstance(error, KeyboardInterrupt):
        return 130
    return exit_status(error.code) if isinstance(error, SystemExit) else None


def _stop_signal(error: BaseException) -> int:
    """Return the signal on which a rank that ends with ``error`` leaves without the others, or 0."""
    if isinstance(error, StopRequested):
        return error.signum
    if isinstance(error, KeyboardInterrupt):  # before a Trainer handles signals, or the second one
        return 0 if is_agreed(error) else int(signal.SIGINT)
    return (_exit_code(error) or 128) - 128 if is_agreed(error) is False else 0


def is_timeout(error: BaseException) -> bool:
    """Return whether ``error`` is a process group's or a store's time-out."""
    return _is_runtime(error) and _TIMEOUT.search(message_of(error)) is not None


def is_transport_error(error: BaseException) -> bool:
    """Return whether ``error`` reports a peer as gone or unresponsive: the cause is on another rank."""
    return _is_runtime(error) and (_CLOSED.search(message_of(error)) is not None or is_timeout(error))


def _is_runtime(error: BaseException) -> bool:
    # torch's distributed errors are all RuntimeErrors; a user's ConnectionError from a data source is not, and a
    # loader's time-out is a RuntimeError that has nothing to do with ranks, nor has what torch's allocator for the CPU
    # raises by the same macro as gloo its errors ("[enforce fail at alloc_cpu.cpp:127] ... can't allocate memory").
    if isinstance(error, TorchhalError) or not isinstance(error, RuntimeError):
        return False
    message = message_of(error)
    return not message.startswith("DataLoader") and "allocate memory" not in message


def mark_printed(error: BaseException) -> None:
    """Mark the traceback of ``error`` as printed."""
    try:
        error._torchhal_printed = True  # type: ignore[attr-defined]
    except AttributeError:  # slots
        pass


def was_printed(error: BaseException) -> bool:
    """Return whether :func:`mark_printed` was called for ``error``."""
    return bool(getattr(error, "_torchhal_printed", False))


def print_failure(failure: Failure) -> None:
    """Print the failing rank's report on stderr."""
    write_stderr(f"torchhal: {failure.text().rstrip()}\n")


uncaught: list[Callable[[BaseException], None]] = []
"""Called with an error that ends this process, before it is printed, to report it to the other ranks."""


closing: list[Callable[[BaseException], BaseException]] = []
"""Called with what ends this process, an exit included: each ends what is open and returns the error in its place."""


def close_open(error: BaseException) -> BaseException:
    """End what is open in this process with the error that ends it, and return the error to report in its place."""
    for close in closing:
        error = close(error)
    return error


def install_excepthook() -> None:
    """Install a hook that prints each rank's failure once, not on every rank, nor below the peer errors it caused.

    Nothing more is printed for a stop on Ctrl-C. Idempotent, and torchhal's only hook: two would wrap each other
    repeatedly.
    """
    previous = sys.excepthook
    if getattr(previous, "_torchhal", None) is not None:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (closed := close_open(error)) is not error:
            kind, error, trace = type(closed), closed, closed.__traceback__
            if is_orderly(error):  # the interpreter takes the status of an exit from a hook, too
                raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else exit_status(error.code))  # type: ignore[attr-defined]
        if is_orderly(error):
            return
        for tell in uncaught:
            tell(error)
        if isinstance(error, RankFailedError):
            if was_printed(error):
                write_stderr(f"torchhal: stopped because rank {error.rank} failed (see above).\n")
            else:
                write_stderr(f"torchhal: {message_of(error).rstrip()}\n")
        elif not was_printed(error):
            previous(kind, error, trace)

    hook._torchhal = previous  # type: ignore[attr-defined]
    sys.excepthook = hook


def exit_for_signal(signum: int, *, agreed: bool | None = None) -> BaseException:
    """Return the exception that ends a program with the status expected for ``signum``.

    An uncaught KeyboardInterrupt made here ends it with SIGINT's code and without a traceback.

    ``agreed`` records for the launcher, in ``signals.is_agreed``, whether all ranks stop at one place and may still be
    writing.
    """
    error: BaseException
    if signum == signal.SIGINT:
        install_excepthook()
        error = KeyboardInterrupt()  # no subclass: Python gives the code for KeyboardInterrupt itself only
    else:
        error = SystemExit(128 + signum)
    error.__dict__[AGREED] = agreed
    error.__dict__["_render_traceback_"] = functools.partial(_shown_in_a_notebook, type(error).__name__)
    return error


def _shown_in_a_notebook(name: str) -> list[str]:
    """Return the text for IPython to print for an error; the line above has the reason."""
    return [f"{name}: stopped in order"]


_torchs: tuple[Any, Any] | None = None
"""(sys.excepthook before torch put its own around it, torch's)."""


@contextmanager
def one_rank_prefix() -> Iterator[None]:
    """Keep the traceback hook single around ``init_process_group``.

    torch puts ``[rankN]:`` before every line of a traceback, by a hook around the one that exists, and
    ``destroy_process_group`` doesn't remove it: a script with ten fits would print ten of them.
    """
    global _torchs
    hook, had_own = sys.excepthook, False
    while True:
        if (below := getattr(hook, "_torchhal", None)) is not None:
            hook, had_own = below, True
        elif _torchs is not None and hook is _torchs[1]:
            hook = _torchs[0]
        else:
            break
    sys.excepthook = hook
    try:
        yield
        _torchs = (hook, sys.excepthook)
    finally:
        if had_own:
            install_excepthook()


supervised = False
"""Set in workers whose launching process is not a rank: it prints the failure, and they print nothing."""

sender: Callable[[Failure], None] | None = None
"""Function that reports a failure to the launching process, where there is no pipe to it."""

_reported = False

_ENTERED, _LEFT = b"+", b"-"

amid_call = False
"""True if this process, which a launcher started, is in a launched call, or left it by an exit."""


def send_report(failure: Failure) -> None:
    """Send the launching process the reason for this one's end, on the first call; do nothing if none reads it."""
    global _reported
    if _reported:
        return
    _reported = True
    descriptor = os.environ.get(REPORT_FD, "")
    try:
        if sender is not None:
            sender(failure)
        elif descriptor.isdigit():
            os.write(int(descriptor), failure.to_json())
    except OSError:
        pass


def mark_call(*, entered: bool) -> None:
    """Report to the launching process that this one is inside a launched call, or has left it.

    An exit with status 0 doesn't indicate that.
    """
    global amid_call
    amid_call = entered
    descriptor = os.environ.get(REPORT_FD, "")
    if descriptor.isdigit():
        try:
            os.write(int(descriptor), _ENTERED if entered else _LEFT)
        except OSError:
            pass


class ReportReader:
    """A reader of what a child wrote with :func:`mark_call` and :func:`send_report`. Never waits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._data = b""
        self.inside = False
        """True if the child is inside a call, or ended in one."""
        self.calls = 0
        """Number of calls that the child has left."""

    def drain(self) -> None:
        """Read what is available, as the pipe's capacity is limited."""
        try:
            os.set_blocking(self._descriptor, False)
            while chunk := os.read(self._descriptor, 65536):
                self._data += chunk
        except OSError:  # nothing there yet, or a process that the child started holds the pipe open
            pass
        rest = self._data.lstrip(_ENTERED + _LEFT)
        marks = self._data[: len(self._data) - len(rest)]
        self._data = rest
        self.calls += marks.count(_LEFT)
        if marks:
            self.inside = marks.endswith(_ENTERED)

    def finish(self) -> Failure | None:
        """Return the report of a child that has ended."""
        self.drain()
        os.close(self._descriptor)
        return _parse(self._data)


def _parse(data: bytes) -> Failure | None:
    try:
        return Failure.from_json(data) if data else None
    except (ValueError, TypeError):  # killed while writing
        return None
