"""The processes that a rank has started, and the thread that supervises them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchhal.distributed import failures, process
from torchhal.distributed._rank_monitor import active_watches
from torchhal.distributed._rendezvous_state import no_linger, note_ended
from torchhal.distributed._stop_agreement import stop_is_agreed
from torchhal.distributed.failures import Failure, exit_for_signal
from torchhal.launchers._exit_monitor import ExitMonitor

GRACE = 5.0
"""Seconds that the others get to return from a collective by themselves after one has failed."""

KILL_AFTER = 3.0
"""Seconds between SIGTERM and SIGKILL."""

EXIT_WAIT = 60.0
"""Seconds that healthy processes wait for each other to end."""


class ChildProcesses:
    """Started processes by rank. Made once per launching process.

    The thread polls them several times a second. When one fails, it notifies this process's rank monitors, ends the
    others after a grace period, and ends this process too if its main thread doesn't return from a wait. One that left
    on a signal has not failed: if the ranks have agreed where to stop it was merely faster than this one, else this
    process ends on the signal too.

    Args:
        processes: those that were started, by rank.
        reports: the descriptor from which to read why each failed.
        monitor: reports this process's own death, as long as there are others that would end with it.
    """

    def __init__(
        self,
        processes: dict[int, subprocess.Popen[bytes]],
        reports: dict[int, int],
        monitor: ExitMonitor | None = None,
    ) -> None:
        self.processes = processes
        self._monitor = monitor
        self.failure: Failure | None = None
        self.raised = False
        """True if the main thread has raised :attr:`failure`."""
        self._reports = {rank: failures.ReportReader(descriptor) for rank, descriptor in reports.items()}
        self._codes: dict[int, int] = {}
        self._failed_at = 0.0
        self._terminated_at = 0.0
        self._secondary: tuple[float, Failure] | None = None
        self._stopped: tuple[float, Failure] | None = None  # its stop_signal is the signal
        self._inside = 0
        self._calls = 0
        self._ending = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._done = threading.Event()
        process.on_leave(self.kill)
        process.on_leave(self._stop_monitor)
        threading.Thread(target=self._run, name="torchhal-children", daemon=True).start()

    @property
    def is_mine(self) -> bool:
        """False in a fork of the launching process."""
        return self._pid == os.getpid()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Return a context that the main thread has to leave when a child fails, else the process is ended."""
        self._calls += 1
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def check(self) -> None:
        """Raise RankFailedError when a child has failed, and the exception for a signal when one left on it."""
        if not self.is_mine:
            return
        if self.failure is not None:
            self.raised = True
            raise self.failure.error()
        if (signum := self.stop_signal) is not None:
            self.raised = True
            raise exit_for_signal(signum, agreed=False)

    @property
    def stop_signal(self) -> int | None:
        """The signal on which a child has left without an agreement."""
        if self._stopped is None or stop_is_agreed():
            return None
        return self._stopped[1].stop_signal

    def wait_for_failure(self, timeout: float) -> Failure | None:
        """Return the failure of a child, waiting a moment for one, or for one to have left on a signal."""
        deadline = time.monotonic() + timeout
        while self.failure is None and self.stop_signal is None and not self._done.is_set():
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return self.failure

    def end(self, grace: float) -> None:
        """Return when all have ended: by themselves within ``grace`` seconds, else by SIGTERM, else by SIGKILL."""
        self._ending = True
        if not self._wait(grace):
            self._signal(signal.SIGTERM)
            if not self._wait(KILL_AFTER):
                self.kill()
                self._wait(2.0)

    def kill(self) -> None:
        """Send SIGKILL to all, now."""
        if self.is_mine:
            self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))

    def at_exit(self) -> None:
        """End the children when the launching process's interpreter exits: none is left over, no failure is lost."""
        if not self.is_mine:
            return
        try:
            self._end_with_the_others()
        finally:
            self._stop_monitor()

    def _end_with_the_others(self) -> None:
        if self.raised or not self._calls:  # interrupted before its first call: there is nothing to wait for
            self.end(max(0.0, self._failed_at + GRACE - time.monotonic()) if self.failure is not None else 0.0)
            return
        self._wait(EXIT_WAIT, until_failure=True)
        failure, late = self.failure, self._alive()
        if failure is None and self._stopped is not None:
            self.end(0.0)
            process.leave(128 + self._stopped[1].stop_signal)
        if failure is None and not late:
            return
        if failure is None:
            failure = Failure(late[0], f"still ran {EXIT_WAIT:.0f} s after rank 0 had ended")
        self.end(GRACE if self.failure is not None else 0.0)
        if not failure.printed:
            failures.print_failure(failure)
        process.write_stderr(f"torchhal: rank {failure.rank} failed after rank 0 was done: exit code 1.\n")
        process.leave(1)  # a handler can change the interpreter's status only this way

    def _stop_monitor(self) -> None:
        if self._monitor is not None and self.is_mine:
            self._monitor.stop()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._done.is_set():
            self._look()
            self._act()
            if len(self._codes) == len(self.processes):
                self._done.set()
            self._done.wait(0.1)
        if self.failure is None:  # no process is left that would end with this one
            self._stop_monitor()
        while self.failure is not None and self._inside and self.is_mine:
            self._act()  # all have ended, but the main thread still waits for them
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
                note_ended(rank)
                # A rank that has finished the call that this one is still in may have ended its script.
                amid = reader.inside or (self._inside > 0 and reader.calls < self._calls)
                if self._ending or (code == 0 and not amid):
                    continue
                signum = process.stop_signal(code)
                followed = report is not None and report.secondary and not stop_is_agreed()
                if signum is not None and (report is None or followed or report.exit_code == code):
                    self._stop(Failure.from_signal(rank, signum))
                    continue
                where = " in the midst of the run" if code == 0 else ""
                self._fail(report or Failure(rank, process.describe_exit(code) + where, signal=max(0, -code)))

    def _stop(self, failure: Failure) -> None:
        if self._stopped is not None:
            return
        self._stopped = (time.monotonic(), failure)
        if self.stop_signal is not None:  # that rank won't arrive
            for watch in active_watches():
                watch.report_for(failure)

    def _fail(self, failure: Failure) -> None:
        if self.failure is not None:
            return
        if failure.secondary:  # it followed another failure, which that rank or this process reports
            self._secondary = self._secondary or (time.monotonic(), failure)
            return
        self.failure = failure
        self._failed_at = time.monotonic()
        no_linger()
        for watch in active_watches():
            watch.report_for(failure)

    def _act(self) -> None:
        now = time.monotonic()
        if self.failure is None and self._secondary is not None and now - self._secondary[0] > GRACE:
            first = self._secondary[1]
            if not self._ending:
                self._fail(Failure(first.rank, first.message, first.traceback, first.printed))
        if self.failure is None and self._stopped is not None and not self._ending:
            stopped_at, failure = self._stopped
            if self.stop_signal is None:
                if now - stopped_at > EXIT_WAIT:
                    self._fail(failure)
            elif self._inside and now - stopped_at > GRACE + 1.0:
                here = f"rank 0 did not come back from where it waits within {GRACE:.0f} s"
                process.write_stderr(f"torchhal: {failure.text()}, and {here}: all processes of the job end.\n")
                process.leave(128 + failure.stop_signal)
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
