"""Run functions on the ranks of a pool of processes, which is kept from check to check.

An error names a rank that sends no result in time, and the pool's next call starts new processes. Each rank has the
environment of a process that torchrun has started, with a store that the process with the checks serves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, Final

from torchhal.distributed.stores import TCPStore
from torchhal_conformance._check import CheckFailed, MissingInput, MissingRequirement, NotApplicable, Skipped
from torchhal_conformance._error_text import shortened, text_of
from torchhal_conformance._fork_server import ForkServer
from torchhal_conformance._limits import scaled

_SKIPS: Final = frozenset(kind.__name__ for kind in (Skipped, MissingInput, MissingRequirement, NotApplicable))

GRACE: Final = 3.0
"""Seconds that the other ranks have left once one has failed: they may be waiting for it."""


@dataclass
class Outcome:
    """Outcome of a call on one rank: the returned ``value``, or an error of the class named ``error``."""

    value: Any = None
    error: str = ""
    message: str = ""
    traceback: str = ""
    at: float = 0.0
    """Time of the error by :func:`time.monotonic`, which all ranks share."""
    frames: tuple[tuple[str, int], ...] = ()
    """File and line of each call in which it was raised, the innermost last."""


class WorkerUnresponsive(CheckFailed):
    """Failure of a rank that sent no result in time, or died."""


class WorkerPool:
    """Pool of ``size`` processes for the checks of one component, started on first use.

    Args:
        server: makes the processes.
        size: how many.
        one_per_node: True to give each process the variables of the only one on its node.
    """

    def __init__(self, server: ForkServer, size: int, *, one_per_node: bool = False) -> None:
        self.size = size
        self._nodes = size if one_per_node else 1
        self._server = server
        self._folder = ""
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._store: Any = None
        self._calls = 0

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 30.0) -> list[Any]:
        """Run ``function(*arguments)`` on every rank and return the values in rank order.

        Raises:
            WorkerUnresponsive: ranks sent no result for ``timeout`` seconds, each named as HANG with its stack, or
                died. The processes are ended then; the next call starts new ones.
            CheckFailed, Skipped: a rank raised it.
        """
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.error}
        skipped = [outcome for outcome in failed.values() if outcome.error in _SKIPS]
        if skipped and len(skipped) == len(failed):
            raise Skipped(skipped[0].message)
        if failed:
            raise self._with_cause(CheckFailed(self._told(failed)), failed)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *arguments: Any, timeout: float = 30.0) -> list[Outcome]:
        """Run ``function(*arguments)`` as :meth:`run` does, but return errors as outcomes."""
        try:
            return self._outcomes(function, arguments, timeout)
        except BaseException:
            self.stop()
            raise

    def _outcomes(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Outcome]:
        self._start()
        self._calls += 1
        payload = pickle.dumps((self._calls, function.__module__, function.__qualname__, arguments))
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(payload)
            except OSError:
                raise WorkerUnresponsive(f"world of {self.size}: rank {rank} DIED before the check began") from None
        outcomes: dict[int, Outcome] = {}
        timeout = scaled(timeout)
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.size:
            waiting = {rank: c for rank, c in enumerate(self._connections) if rank not in outcomes}
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._report_silence(waiting, outcomes, timeout)
            for rank, connection in waiting.items():
                if connection not in ready:
                    continue
                try:
                    outcomes[rank] = connection.recv()
                except (EOFError, OSError):
                    told = f"\n{self._told(outcomes)}" if any(o.error for o in outcomes.values()) else ""
                    raise WorkerUnresponsive(
                        f"world of {self.size}: rank {rank} DIED{told}{self._printed([rank])}"
                    ) from None
                # a rank that skips is alone with it for a moment only, and one that starts may take long
                if outcomes[rank].error and outcomes[rank].error not in _SKIPS:
                    deadline = min(deadline, time.monotonic() + scaled(GRACE))
        return [outcomes[rank] for rank in range(self.size)]

    def _report_silence(self, waiting: Iterable[int], outcomes: dict[int, Outcome], timeout: float) -> None:
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error}
        names = ", ".join(f"rank {rank}" for rank in waiting)
        if failed:  # the others were waiting for it
            told = f"{self._told(failed)}\n(in a world of {self.size}: {names} HANG, waiting for a rank that failed)"
            raise self._with_cause(WorkerUnresponsive(told), failed)
        stacks = "\n".join(f"rank {rank} is at:\n{self._stack(rank)}" for rank in waiting)
        silent = ", ".join(f"rank {rank} HANG" for rank in waiting)
        error = WorkerUnresponsive(
            f"world of {self.size}: {silent} after {timeout:g} s\n{stacks}{self._printed(waiting)}"
        )
        error.hung = True
        raise error

    def _printed(self, ranks: Iterable[int]) -> str:
        """Return the last 2000 characters of each rank's stdout and stderr, a crash's own message included."""
        told = []
        for rank in ranks:
            try:
                with open(os.path.join(self._folder, f"output-{rank}"), encoding="utf-8", errors="replace") as file:
                    text = file.read()[-2000:].strip()
            except OSError:
                continue
            if text:
                told.append(f"\nrank {rank} wrote:\n{text}")
        return "".join(told)

    def _told(self, failed: dict[int, Outcome]) -> str:
        lines = []
        for rank, outcome in sorted(failed.items()):
            if not outcome.error:
                continue
            text = outcome.message if outcome.error == CheckFailed.__name__ else outcome.traceback
            lines.append(f"rank {rank} of {self.size}: {text}")
        return "\n".join(dict.fromkeys(lines))

    def _with_cause(self, error: CheckFailed, failed: dict[int, Outcome]) -> CheckFailed:
        """Give ``error`` what the first rank that failed raised, unless it measured a difference."""
        rank, first = min(failed.items(), key=lambda one: one[1].at)
        if first.error != CheckFailed.__name__:
            message = (first.message.strip().splitlines() or [""])[0]
            error.raised = f"rank {rank} of {self.size}: {first.error}{f': {message}' if message else ''}"
            error.frames = first.frames
        return error

    def _stack(self, rank: int) -> str:
        path = os.path.join(self._folder, f"stack-{rank}")
        try:
            os.kill(self._pids[rank], signal.SIGUSR1)
            time.sleep(0.3)
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return "(unknown)"

    def _start(self) -> None:
        if self._connections:
            return
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._folder = tempfile.mkdtemp(prefix="torchhal-")
        per_node = self.size // self._nodes
        key, job = secrets.token_bytes(16), uuid.uuid4().hex
        for rank in range(self.size):
            address = os.path.join(self._folder, f"rank-{rank}")
            environ = {
                **{name: value for name, value in os.environ.items() if name not in _LAUNCHERS},
                "RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "GROUP_RANK": str(rank // per_node),
                "WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(per_node), "GROUP_WORLD_SIZE": str(self._nodes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port), "TORCHELASTIC_RUN_ID": job,
                "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", _KEY: key.hex(),
            }  # fmt: skip
            path = [os.path.abspath(entry) for entry in sys.path]
            output = os.path.join(self._folder, f"output-{rank}")
            with Listener(address, family="AF_UNIX", authkey=key) as listener, open(output, "wb") as file:
                written = {1: file.fileno(), 2: file.fileno()}
                self._server.fork(["-c", _RANK, address], environ, descriptors=written, path=path)
                try:
                    connection = _accept(listener)
                except RuntimeError as error:
                    raise RuntimeError(f"{error}{self._printed([rank])}") from None
            self._connections.append(connection)
            self._pids.append(connection.recv())

    def stop(self) -> None:
        """End every process. The next call starts others."""
        for pid in self._pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for connection in self._connections:
            connection.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._connections, self._pids, self._store, self._folder = [], [], None, ""


_KEY: Final = "TORCHHAL_CONFORMANCE_KEY"
_RANK: Final = "from torchhal_conformance._worker_pool import main; main()"
_LAUNCHERS: Final = ("TORCHHAL_LAUNCH_ID", "TORCHHAL_LAUNCH_KIND", "TORCHHAL_PARENT_PID", "NODE_RANK")


def _accept(listener: Listener) -> Connection:
    """Return the next connection; raise RuntimeError after 120 s, as the process may have failed to start."""
    socket: Any = listener._listener._socket  # type: ignore[attr-defined]  # there is no public way to wait
    socket.settimeout(120)
    try:
        return listener.accept()
    except TimeoutError:
        raise RuntimeError("a process for the checks could not be started in 120 s") from None


# -- in a rank -----------------------------------------------------------------------------------------------


def main() -> None:
    """Serve calls as the rank that the environment names, until the process that runs the checks ends."""
    _end_with(os.getppid())
    # a shell starts what runs behind "&" with an ignored SIGINT: checks send these signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _serve(sys.argv[1], bytes.fromhex(os.environ.pop(_KEY)), int(os.environ["RANK"]))
    finally:
        os._exit(0)  # threads of a process group may abort an orderly exit


def _end_with(parent: int) -> None:
    """End this process soon after its parent, even while it waits in C code."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="torchhal-conformance-parent").start()


def _serve(address: str, key: bytes, rank: int) -> None:
    """Run received calls until the connection closes; stdout and stderr go to a file, which a failure shows."""
    folder = os.path.dirname(address)
    faulthandler.enable(all_threads=False)
    stacks = open(os.path.join(folder, f"stack-{rank}"), "wb")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    connection = Client(address, family="AF_UNIX", authkey=key)
    connection.send(os.getpid())
    while True:
        try:
            payload = connection.recv_bytes()
        except (EOFError, OSError):
            return
        outcome = _call(payload)
        try:
            connection.send(outcome)
        except (EOFError, OSError):
            return
        except Exception as error:  # a value that can't be pickled
            connection.send(
                Outcome(error=type(error).__name__, message=text_of(error), traceback=shortened(traceback.format_exc()))
            )


def _call(payload: bytes) -> Outcome:
    try:
        number, module, name, arguments = pickle.loads(payload)
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        os.environ[CALL] = str(number)
        return Outcome(function(*arguments))
    except BaseException as error:
        kind = "CheckFailed" if isinstance(error, CheckFailed) else type(error).__name__
        frames = tuple((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))
        told = traceback.format_exc()
        return Outcome(
            error=kind, message=text_of(error), traceback=shortened(told), at=time.monotonic(), frames=frames
        )


CALL: Final = "TORCHHAL_CONFORMANCE_CALL"
"""In a rank: the number of the call that it answers, the same on all."""
