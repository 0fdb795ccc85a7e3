"""Run one thread per rank that reads the other ranks' posts: failures, requests to stop, missing ranks."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from typing import Any

from torchhal.distributed import failures
from torchhal.distributed._failure_reports import FailureReports
from torchhal.distributed.failures import Failure
from torchhal.distributed.process import leave, write_stderr
from torchhal.distributed.signals import StopSignals
from torchhal.distributed.stores import Store, first_line, own_connection

__all__ = ["RankMonitor", "StopSignals", "active_watches"]

_active: weakref.WeakSet[RankMonitor] = weakref.WeakSet()


def active_watches() -> list[RankMonitor]:
    """Return the started monitors of this process; a launcher reports ended processes to them."""
    return [watch for watch in _active if watch.pid == os.getpid()]


def _report_uncaught(error: BaseException) -> None:
    """Report an error that ends this process during a run without a Trainer to the other ranks."""
    for watch in active_watches():
        watch.report_failure(error)


def _stop_at_exit() -> None:
    """Stop the monitors of a process that ends without a tear-down, so that it doesn't count as killed."""
    for watch in active_watches():
        watch.stop()


failures.uncaught.append(_report_uncaught)
_exit_registered_in = 0
"""Process in which :func:`_stop_at_exit` is registered; a worker doesn't inherit its parent's exit handlers."""


class RankMonitor(FailureReports):
    """The messages that ranks exchange beside their collectives, and the thread that reads them.

    Started after the process group is set up, stopped before it is destroyed. The thread has its own connection to
    the store and reads one counter every ``interval`` seconds: one round trip, independent of the world's size.
    In a world of one there is neither thread nor store; all methods still work.

    **Failure.** :meth:`report_failure` posts a rank's traceback before any tear-down; :meth:`explain` turns
    the "connection closed" that the others get into RankFailedError with that traceback. A rank whose main thread
    doesn't return within ``grace`` seconds of a failure elsewhere - it hangs in a collective, in a sleep, in C -
    is ended by its thread, in any case after ``limit`` seconds.

    **Stop.** :meth:`request_stop` requests that all ranks stop after the same step, see :class:`StopAgreements`.

    **Barrier.** :meth:`barrier` raises an error that names the missing ranks and their positions.

    **Hang.** When a barrier or collective times out, or a connection closes or a process aborts and no failure was
    posted, every rank dumps its stacks, see :class:`HangDump`, and the error names the dump.

    Args:
        store: the process group's store, as ``next_generation`` gave it.
        prefix: put before all keys, so that the store can be shared.
        silence: seconds without a response after which a rank that is past its deadline gives up on the store.
        announce: print this rank's own failure to stderr when it is reported; None: unless a supervisor prints it.
    """

    def start(self) -> RankMonitor:
        """Start the thread; idempotent."""
        if self._store is not None and self._thread is None:
            self._forget_agreement()
            failures.install_excepthook()
            self._register_exit()
            self.hang.introduce(self._store)
            self._thread_store = own_connection(self._store)
            self._thread = threading.Thread(target=self._run, name="torchhal-watch", daemon=True)
            self._thread.start()
            self._guardian = threading.Thread(target=self._guard, name="torchhal-watch-guard", daemon=True)
            self._guardian.start()
            _active.add(self)
        return self

    def _register_exit(self) -> None:
        global _exit_registered_in
        self.pid = os.getpid()
        if _exit_registered_in != self.pid:
            _exit_registered_in = self.pid
            atexit.register(_stop_at_exit)

    def stop(self, error: BaseException | None = None) -> None:
        """End the thread and sign off: from now on no rank waits for this one. Idempotent, never raises.

        Args:
            error: the error with which this rank leaves. Not a failure of the job by itself, as the caller may expect
                it; it is reported to a rank that waits for this one.
        """
        _active.discard(self)
        thread, self._thread = self._thread, None
        self._stopping = True
        if thread is None or self._store is None:
            return
        self._wake.set()
        self._ended.set()
        if self._guardian is not None and self._guardian is not threading.current_thread():
            self._guardian.join(timeout=1.0)
        if thread is not threading.current_thread():
            thread.join(timeout=5.0 if self._lost is None else 0.1)  # it may be stuck in an unresponsive store
        if self._lost is None:
            try:
                said = "" if error is None else Failure.from_exception(self.rank, error).to_json().decode()
                self._store.set(self._key(f"bye/{self.rank}"), said)
            except RuntimeError:  # the host has ended: no rank is left to notify
                pass

    def __enter__(self) -> RankMonitor:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopping:
            if self._lost is None:
                self._looking = True
                try:
                    self._look()
                except RuntimeError as error:
                    if not self._stopping:
                        self._lose(first_line(error))
                self._looking = False
                self._looks += 1
            self._end_if_overdue()
            self._wake.wait(0.02 if self._pending() else self.interval)
            self._wake.clear()

    def _guard(self) -> None:
        """Give up on a store whose host is stopped: the connection stays open and requests never time out.

        Only after the main thread's deadline: until then the host may be continued. Silence is counted in this
        thread's own steps, so that the time for which this process was itself stopped doesn't count.
        """
        silent, step, looks = 0.0, 0.25, -1
        while not self._stopping:
            self._ended.wait(step)
            if not self._looking or self._looks != looks:
                silent, looks = 0.0, self._looks
                continue
            silent += step
            waited = self._back or (self._meet_until is not None and time.monotonic() > self._meet_until)
            if silent >= self.silence and waited:
                self._lose(f"no answer for {silent:.0f} s")
            if self._lost is not None or self._discovered is not None:
                self._end_if_overdue()

    def _look(self) -> None:
        store = self._thread_store
        assert store is not None
        while self._outbox:
            self._events.post(store, self._outbox[0])
            self._outbox.pop(0)
        self.hang.learn(store)
        self._post_wishes(store)
        count = self._events.count(store)
        while self._seen < count and not self._stopping:
            self._take(store, self._events.read(store, self._seen + 1))
            self._seen += 1
        if (pending := self._pending()) is not None:
            self._advance(store, pending)

    def _take(self, store: Store, event: dict[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "failure":
            failure = Failure.from_json(event["failure"].encode())
            if failure.rank != self.rank:
                self._learn(failure)
            if failure.aborted:
                self._dump_and_answer(store, f"rank {failure.rank} {failure.message}")
        elif kind == "waited":
            self._waited[int(event["rank"])] = bool(event["timed_out"])
        elif kind == "hang":
            self._dump_and_answer(store, event["why"])
        elif kind == "ping":
            store.set(self._key(f"pong/{event['token']}/{self.rank}"), "1")
        elif kind == "stop":
            self._take_stop(store, int(event["signum"]))

    def _dump_and_answer(self, store: Store, why: str) -> None:
        self._looking = False  # a slow disk must not count as an unresponsive store
        self.hang.write(why, self.steps_done)
        self._looking = True
        self.hang.answer(store)

    def _end_if_overdue(self) -> None:
        if self._discovered is None or self._stopping:
            return
        passed = time.monotonic() - self._discovered
        if passed < (self.limit if self._back else self.grace):
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
        cause = self._failure
        stopped = next((one for one in (cause, self._own) if one is not None and one.stop_signal), None)
        if stopped is not None:
            failures.send_report(Failure.from_signal(self.rank, stopped.stop_signal))
            leave(128 + stopped.stop_signal)
            return
        if cause is not None and not cause.printed and self._announce:
            failures.print_failure(cause)
        if cause is not None:
            why = f"rank {cause.rank} failed"
        elif self._own is not None:
            why = "it failed itself"
        else:
            why = self._store_lost()  # no disk or other process is accessed here: the deadline has passed
        here = f"{failures.STILL_HERE} {passed:.0f} s after {why}, and leaves"
        failures.send_report(Failure(self.rank, here, stack, secondary=cause is not None))
        if not failures.supervised:
            write_stderr(f"torchhal: rank {self.rank} {here}. It was at:\n{stack}")
        leave(1)
