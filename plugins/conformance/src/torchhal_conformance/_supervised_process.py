"""Run the checks of one component in a process of its own, and tell how that process ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from torchhal.cli import echo
from torchhal.errors import ConfigurationError
from torchhal_conformance._limits import scaled

STACK: Final = "stack"
"""File in the process's folder for temporary files, into which SIGUSR1 writes the stack of every thread."""

_START: Final = 180.0
"""Seconds for the imports of torch and of the component, and for the author's factories."""
_GRACE: Final = 15.0
"""Seconds beyond a check's own limit: the process itself reports a hang, unless it waits in C code."""
_INTERVAL: Final = 0.2
_CODE: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from torchhal_conformance._checking_process import main; main()"
)


OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "tables": ("cluster_environment",),
    "launcher": ("cluster_environment",),
    "model": ("strategy",),
    "data": ("strategy",),
}
"""Argument -> the kinds of components that it means something for; others are for all."""


@dataclass(frozen=True)
class Request:
    """What to check and how: the arguments of ``torchhal conformance run``, as texts."""

    kind: str = ""
    alias: str = ""
    level: str | None = None
    features: str = ""
    accelerator: str = "cpu"
    launcher: str | None = None
    tables: str | None = None
    model: str | None = None
    data: str | None = None
    check: Sequence[str] = ()
    seed: int = 0
    report: str | None = None
    html: str | None = None
    junit: str | None = None
    badge: str | None = None
    verbose: bool = False
    json: bool = False


def run_supervised(
    request: Request, *, show: Callable[[str], None] = echo, stop: Callable[[], bool] = lambda: False
) -> int | None:
    """Make the checks in another process, and return the exit code of ``torchhal conformance run``.

    A component that ends, crashes or blocks its process fails the check that was being made; the other checks are made
    in a new process then.

    Args:
        request: what to check.
        show: gets each line of the command's output.
        stop: is asked some times per second; True ends the run.

    Returns:
        None where ``stop`` ended it.

    Raises:
        ConfigurationError: an argument that can't be; no check was made.
    """
    made: list[dict[str, Any]] = []
    while True:
        before = len(made)
        with _Process(request, made, show) as process:
            code = process.follow(stop)
        if code is not None or process.stopped:
            return code
        if process.running is not None:
            died = process.death("the check")
            made.append({"check": process.running, "outcome": "failed", "reason": died, "seconds": process.seconds})
            if not request.json:
                show(f"{process.running} failed  {process.seconds:6.2f} s  {died.splitlines()[0]}")
        elif len(made) == before:  # another process would end at the same place
            place = f"the import of {request.kind} {request.alias!r}" if not made else "the report, after the checks,"
            print(f"error: {process.death(place)}", file=sys.stderr)
            return 1


class _Process:
    """A process that makes checks, from its start to its end."""

    def __init__(self, request: Request, made: list[dict[str, Any]], show: Callable[[str], None]) -> None:
        self.running: str | None = None
        """Id of the check that is being made."""
        self.seconds = 0.0
        """Time since that check began, when the process had ended."""
        self.stopped = False
        self._hang = ""
        self._began = time.monotonic()
        self._limit = scaled(_START)
        self._request, self._made, self._show_line = request, made, show
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def __enter__(self) -> _Process:
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(_temporary_folder())
            stack.enter_context(_ended_by_sigterm())
            self._process = subprocess.Popen(
                [
                    sys.executable, *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                    "-c", _CODE, json.dumps([os.path.abspath(path) for path in sys.path]),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
                env={**os.environ, "TMPDIR": self.folder},
                start_new_session=True,  # Ctrl-C in a terminal reaches this process, which ends the other
            )  # fmt: skip
            stack.callback(self._end)
            threading.Thread(target=self._read, daemon=True, name="torchhal-conformance-events").start()
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # it is dead already, which follow() sees
                self._process.stdin.write(json.dumps({**asdict(self._request), "made": self._made}) + "\n")
                self._process.stdin.flush()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # closed, or ended in the midst of a letter
            for line in self._process.stdout:
                self._events.put(line)
        self._events.put(None)

    def follow(self, stop: Callable[[], bool]) -> int | None:
        """Print what the process has to tell and keep its results; return its exit code, None if it died."""
        while True:
            try:
                line = self._events.get(timeout=_INTERVAL)
            except queue.Empty:
                if stop():
                    self.stopped = True
                    return None
                self.seconds = round(time.monotonic() - self._began, 3)
                if self._process.poll() is not None:  # a process that it has left may hold its stdout
                    return None
                if self.seconds > self._limit:
                    self._hang = f"after {self._limit:g} s; it was at\n{self._stack_of_threads()}"
                    return None
                continue
            if line is None:
                self.seconds = round(time.monotonic() - self._began, 3)
                return None
            event = json.loads(line)
            if "code" in event:
                return int(event["code"])
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise ConfigurationError(event["error"])
        if "begin" in event:
            self.running, self._began = event["begin"], time.monotonic()
            self._limit = event["limit"] + scaled(_GRACE)
            _show(f"{self.running} ...")
        if "end" in event:
            self._made.append(event["end"])
            self.running, self._began, self._limit = None, time.monotonic(), scaled(_START)
        if "print" in event:
            _show("")
            self._show_line(event["print"])

    def death(self, what: str) -> str:
        """Return how the process ended while ``what`` was being run."""
        if self._hang:
            return f"HANG: the process of {what} was not done {self._hang}"
        code = self._process.returncode
        how = f"with exit code {code}" if code >= 0 else f"by {_signal_name(-code)}"
        return f"DIED: the process of {what} ended {how}, which only the kit may do: stderr may say why"

    def _stack_of_threads(self) -> str:
        path = Path(self.folder, STACK)
        if hasattr(signal, "SIGUSR1"):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        try:
            return path.read_text(encoding="utf-8", errors="replace") or "(unknown)"
        except OSError:
            return "(unknown)"

    def _end(self) -> None:
        """End the process and those of its group; one that has sent its exit code may end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self._hang or self.stopped or sys.exc_info()[0] else 5)
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a request that it didn't read
            self._process.stdin.close()
        _show("")


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Yield a folder for all temporary files of a process, which is removed however the process ends."""
    try:
        # a short name: macOS allows 104 characters for the path of a socket
        made = tempfile.mkdtemp(prefix="torchhal-")
    except OSError as error:
        raise ConfigurationError(f"no folder for temporary files can be made: {error}") from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process by SystemExit, so that it ends the other one and removes its files."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _show(text: str) -> None:
    """Print the current check on a terminal; the next text overwrites it."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
