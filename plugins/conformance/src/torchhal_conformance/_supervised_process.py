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
from torchhal_conformance._limits import SLOWNESS, scaled
from torchhal_conformance._subprocesses import kill_all, processes_with

STACK: Final = "stack"
"""File in the process's folder for temporary files, into which SIGUSR1 writes the stack of every thread."""

_IMPORT_TIMEOUT: Final = 180.0
"""Seconds for the imports of torch and of the component, and for the author's factories."""
_GRACE: Final = 15.0
"""Seconds beyond a check's own limit: the process itself reports a hang, unless it waits in C code."""
_INTERVAL: Final = 0.2
_CODE: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from torchhal_conformance._checking_process import main; main()"
)


OPTIONS: Final[Mapping[str, str]] = {
    "tables": "cluster_environment", "launcher": "cluster_environment", "model": "strategy", "data": "strategy",
}  # fmt: skip
"""Argument -> the kind of components that it means something for; others are for all."""


@dataclass(frozen=True)
class Request:
    """What to check and how: the arguments of ``torchhal conformance run``, as texts."""

    kind: str
    alias: str
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
        show: prints a line of the command's output.
        stop: is asked some times per second; True ends the run.

    Returns:
        None where ``stop`` ended it.

    Raises:
        ConfigurationError: an argument that can't be; no check was made.
    """
    results: list[dict[str, Any]] = []
    instances = True
    while True:
        before = len(results)
        with _Process(request, results, show, instances=instances) as process:
            code = process.read_events(stop)
        if code is not None or process.stopped:
            return code
        if process.running is not None:
            died = process.describe_exit("check")
            results.append({
                "check": process.running, "outcome": "failed", "reason": died, "seconds": process.seconds,
                "hung": process.hung,
            })  # fmt: skip
            if not request.json:
                show(result_line(process.running, "failed", process.seconds, died))
        elif process.imported and instances and (not results or len(results) == before):
            # an instance was made outside of a check, to read its features, and has ended or blocked the process
            instances = False
            died = process.describe_exit(f"making of an instance of {request.kind} {request.alias!r}")
            _tell(f"error: {died}")
            if results and not any(one["outcome"] == "failed" for one in results):
                results[-1] = {**results[-1], "outcome": "failed", "reason": died, "hung": process.hung}
        elif len(results) == before:  # another process would end at the same place
            place = "report that follows the checks" if results else f"import of {request.kind} {request.alias!r}"
            _tell(f"error: {process.describe_exit(place)}")
            return 1


def result_line(id: str, outcome: str, seconds: float, reason: str) -> str:
    """Return the line that is printed when a check has been made."""
    return f"{id} {outcome:<7} {seconds:6.2f} s  {(reason.splitlines() or [''])[0]}".rstrip()


class _Process:
    """A process that makes checks, from its start to its end."""

    def __init__(
        self, request: Request, results: list[dict[str, Any]], show: Callable[[str], None], *, instances: bool
    ) -> None:
        self.imported = False
        """Whether the component has been found and its class loaded."""
        self.running: str | None = None
        """Id of the check that is being made."""
        self.seconds = 0.0
        """Time since that check began, when the process was last looked at."""
        self.stopped = False
        self.hung = False
        self._stack = ""
        self._began = time.monotonic()
        self._limit = scaled(_IMPORT_TIMEOUT)
        self._request, self._results, self._show = request, results, show
        self._instances = instances
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def __enter__(self) -> _Process:
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(_temporary_folder())
            stack.enter_context(ended_by_sigterm())
            self._process = subprocess.Popen(
                [
                    sys.executable, *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                    "-c", _CODE, json.dumps([os.path.abspath(path) for path in sys.path]),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=_stderr(), text=True, encoding="utf-8",
                errors="replace", env={**os.environ, "TMPDIR": self.folder},
                start_new_session=True,  # Ctrl-C in a terminal reaches this process, which ends the other
            )  # fmt: skip
            stack.push(self._end)
            self._reader = threading.Thread(target=self._read, daemon=True, name="torchhal-conformance-events")
            self._reader.start()
            assert self._process.stdin is not None
            request = {
                **asdict(self._request), "results": self._results, "folder": self.folder, "instances": self._instances,
            }  # fmt: skip
            with contextlib.suppress(OSError):  # it is dead already, which read_events() sees
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    def _read(self) -> None:
        """Put the events into the queue, and None behind the last one; run in a thread."""
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # it was closed
            for line in self._process.stdout:
                try:
                    event = json.loads(line)
                except ValueError:
                    event = None
                if isinstance(event, dict):
                    self._events.put(event)
                elif line.endswith("\n"):  # what a sitecustomize prints, say; else the process died amid an event
                    _tell(line.rstrip())
        self._events.put(None)

    def read_events(self, stop: Callable[[], bool]) -> int | None:
        """Print what the process has to tell and keep its results; return its exit code, None if it died."""
        ended = False
        while True:
            try:
                event = self._events.get(timeout=_INTERVAL)
            except queue.Empty:
                if ended:  # a process that it has left holds its stdout
                    return None
                ended = self._process.poll() is not None  # what it has sent comes before the next look
                self._look()
                if not ended and self.seconds > self._limit:
                    self.hung, self._stack = True, self._stack_of_threads()
                    return None
                if not ended and stop():
                    self.stopped = True
                    return None
                continue
            if event is None:
                self._look()
                return None
            if "code" in event:
                return int(event["code"])
            self._handle(event)

    def _look(self) -> None:
        self.seconds = round(time.monotonic() - self._began, 3)

    def _handle(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise ConfigurationError(event["error"])
        if "imported" in event:
            self.imported = True
        if "begin" in event:
            self.running, self._began = event["begin"], time.monotonic()
            self._limit = event["limit"] + scaled(_GRACE)
            _show_progress(f"{self.running} ...")
        if "end" in event:
            self._results.append(event["end"])
            self.running, self._began, self._limit = None, time.monotonic(), scaled(_IMPORT_TIMEOUT)
        if "print" in event:
            _show_progress("")
            self._show(event["print"])

    def describe_exit(self, what: str) -> str:
        """Return how the process ended amid ``what``."""
        if self.hung:
            return (
                f"HANG: the {what} was not done after {self._limit:g} s ({SLOWNESS} makes limits longer); it was at\n"
                f"{self._stack}"
            )
        code = self._process.returncode
        how = f"with exit code {code}" if code >= 0 else f"by {_signal_name(-code)}"
        return f"DIED: the process ended {how} amid the {what}; stderr may say why"

    def _stack_of_threads(self) -> str:
        path = Path(self.folder, STACK)
        if hasattr(signal, "SIGUSR1"):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        try:
            return path.read_text(encoding="utf-8", errors="replace") or "(unknown)"
        except OSError:
            return "(unknown)"

    def _end(self, *error: Any) -> None:
        """End the process and all that it has started; one that has sent its exit code may end by itself."""
        ends_itself = not (self.hung or self.stopped or error[0])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5 if ends_itself else 0)
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        kill_all(processes_with("TMPDIR", self.folder))  # jobs with sessions of their own
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # a request that it didn't read
            self._process.stdin.close()
        self._reader.join(1)
        if not self._reader.is_alive():
            self._process.stdout.close()
        _show_progress("")


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
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process by SystemExit, so that it ends the others and removes its files."""
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


def _stderr() -> int | None:
    """Return what the process gets as stderr: this one's, unless that is closed."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tell(text: str) -> None:
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def _show_progress(text: str) -> None:
    """Print the current check on a terminal; the next text overwrites it."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
