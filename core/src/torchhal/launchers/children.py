"""The processes that a rank has started, and the thread that watches over them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchhal.launchers import failures, process, rendezvous
from torchhal.launchers.failures import Failure
from torchhal.launchers.watch import active_watches

GRACE = 5.0
"""Seconds that the others get to come back from a collective by themselves after one has failed."""

KILL_AFTER = 3.0
"""Seconds between SIGTERM and SIGKILL."""

EXIT_WAIT = 60.0
"""Seconds that healthy processes wait for each other to end."""


class Children:
    """Started processes by rank. Made once per launching process.

    The thread looks at them several times a second. When one fails, it tells this process's rank watches, ends the
    others after a grace, and ends this process too when its main thread doesn't come back from what it waits for.
    """

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]], reports: dict[int, int]) -> None:
        self.processes = processes
        self.failure: Failure | None = None
        self.raised = False
        """Whether the main thread has raised :attr:`failure`."""
        self._reports = {rank: failures.ReportReader(descriptor) for rank, descriptor in reports.items()}
        self._codes: dict[int, int] = {}
        self._failed_at = 0.0
        self._terminated_at = 0.0
        self._secondary: tuple[float, Failure] | None = None
        self._orderly: tuple[float, Failure] | None = None
        self._inside = 0
        self._calls = 0
        self._ending = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._done = threading.Event()
        process.on_leave(self.kill)
        threading.Thread(target=self._run, name="torchhal-children", daemon=True).start()

    @property
    def is_mine(self) -> bool:
        """False in a fork of the launching process."""
        return self._pid == os.getpid()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While entered, a failed child means that the main thread has to come back from here."""
        self._calls += 1
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def check(self) -> None:
        """Raise RankFailedError when a child has failed."""
        if self.failure is not None and self.is_mine:
            self.raised = True
            raise self.failure.error()

    def wait_for_failure(self, timeout: float) -> Failure | None:
        """The failure of a child, waiting a moment for one."""
        deadline = time.monotonic() + timeout
        while self.failure is None and time.monotonic() < deadline and not self._done.is_set():
            time.sleep(0.02)
        return self.failure

    def end(self, grace: float) -> None:
        """Return when all are gone: by themselves within ``grace`` seconds, else by SIGTERM, else by SIGKILL."""
        self._ending = True
        if not self._wait(grace):
            self._signal(signal.SIGTERM)
            if not self._wait(KILL_AFTER):
                self.kill()
                self._wait(2.0)

    def kill(self) -> None:
        """SIGKILL to all, now."""
        if self.is_mine:
            self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))

    def at_exit(self) -> None:
        """Called when the interpreter of the launching process exits: nobody stays behind, no failure is lost."""
        if not self.is_mine:
            return
        if self.failure is not None and self.raised:
            self.end(max(0.0, self._failed_at + GRACE - time.monotonic()))
            return
        self._wait(EXIT_WAIT, until_failure=True)
        failure, late = self.failure or (self._orderly and self._orderly[1]), self._alive()
        if failure is None and not late:
            return
        if failure is None:
            failure = Failure(late[0], f"still ran {EXIT_WAIT:.0f} s after rank 0 had ended")
        self.end(GRACE if self.failure is not None else 0.0)
        if not failure.printed:
            failures.print_failure(failure)
        process.write_stderr(f"torchhal: rank {failure.rank} failed after rank 0 was done: exit code 1.\n")
        process.flush()
        os._exit(1)  # a handler can't change the interpreter's status in any other way

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._done.is_set():
            self._look()
            self._act()
            if len(self._codes) == len(self.processes):
                self._done.set()
            self._done.wait(0.1)
        while self.failure is not None and self._inside and self.is_mine:
            self._act()  # all are gone, but the main thread still waits for them
            time.sleep(0.1)

    def _look(self) -> None:
        with self._lock:
            for rank, child in self.processes.items():
                if rank in self._codes:
                    continue
                reader = self._reports[rank]
                if (code := child.poll()) is None:
                    reader.drain()
                    continue
                report = reader.finish()
                self._codes[rank] = code
                # A rank that is done with the call in which this one still is may well have ended its script.
                amid = reader.inside or (self._inside > 0 and reader.calls < self._calls)
                if self._ending or (code == 0 and not amid):
                    continue
                where = " in the midst of the run" if code == 0 else ""
                failure = report or Failure(rank, process.describe_exit(code) + where, signal=max(0, -code))
                if process.is_signal_status(code) and failure.exit_code == code:
                    # It ends on a signal, as all ranks have agreed, and was faster than this one.
                    self._orderly = self._orderly or (time.monotonic(), failure)
                else:
                    self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        if self.failure is not None:
            return
        if failure.secondary:  # it only followed another; that one, or this process itself, will be heard of
            self._secondary = self._secondary or (time.monotonic(), failure)
            return
        self.failure = failure
        self._failed_at = time.monotonic()
        rendezvous.no_linger()
        for watch in active_watches():
            watch.report_for(failure)

    def _act(self) -> None:
        now = time.monotonic()
        if self.failure is None and self._secondary is not None and now - self._secondary[0] > GRACE:
            first = self._secondary[1]
            if not self._ending:
                self._fail(Failure(first.rank, first.message, first.traceback, first.printed))
        if self._orderly is not None and now - self._orderly[0] > EXIT_WAIT and not self._ending:
            self._fail(self._orderly[1])
        if self.failure is None or now - self._failed_at < GRACE:
            return
        if self._inside and now - self._failed_at > GRACE + 1.0 and not self._ending:
            if not self.failure.printed:
                failures.print_failure(self.failure)
            here = "rank 0 did not come back from where it waits"
            process.write_stderr(f"torchhal: {here} within {GRACE:.0f} s: all processes of the job end.\n")
            process.leave(1)
        if not self._terminated_at:
            self._terminated_at = now
            self._signal(signal.SIGTERM)
        elif now - self._terminated_at > KILL_AFTER:
            self.kill()

    def _alive(self) -> list[int]:
        self._look()
        return [rank for rank in self.processes if rank not in self._codes]

    def _wait(self, timeout: float, *, until_failure: bool = False) -> bool:
        start = time.monotonic()
        told = False
        while alive := self._alive():
            waited = time.monotonic() - start
            if waited > timeout or (until_failure and self.failure is not None):
                return False
            if until_failure and waited > 10.0 and not told:
                told = True
                process.write_stderr(f"torchhal: rank 0 is done and waits for {len(alive)} more: ranks {alive}\n")
            time.sleep(min(0.05, max(0.002, waited * 0.1)))
        return True

    def _signal(self, signum: int) -> None:
        for rank, child in self.processes.items():
            if rank not in self._codes:
                try:
                    child.send_signal(signum)
                except OSError:
                    pass
