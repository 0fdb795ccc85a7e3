"""Signals that ask a job to stop: a handler sets a flag, and nothing else."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

from torchhal.launchers.process import leave, write_stderr

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While entered, SIGTERM and the first SIGINT call ``request(signum)`` instead of ending the process.

    ``request`` runs inside a signal handler: it may set plain attributes and nothing more - no collective, no store,
    no lock (``RankWatch.request_stop`` is made for it). A second SIGINT raises KeyboardInterrupt at once. Leaving
    restores the previous handlers; those are not called in between. Outside the main thread, where Python has no
    signal handlers, it does nothing. A SIGINT that this process was started to ignore (``nohup``, a shell's ``&``)
    stays ignored.

    Python calls a handler between two of its instructions: never while the main thread waits in C for a collective
    that no other rank comes to. So the same signal once more ends the process, with 128 and its number, if the main
    thread is not back in Python ``grace`` seconds later. What comes within ``REPEAT`` seconds of the first is that
    one sent by somebody else, too: a scheduler signals the group and the launcher in it, which passes it on.

    Args:
        request: called with the signal's number.
        signals: which signals ask for a stop; pass ``signal.SIGUSR1`` too where a scheduler warns with it.
        notice: written to stderr at the first SIGINT, e.g. what a second one does. None on ranks other than 0.
        grace: see above, in seconds.
    """

    REPEAT = 2.0

    def __init__(
        self,
        request: Callable[[int], object],
        *,
        signals: Iterable[int] = DEFAULT_SIGNALS,
        notice: str | None = None,
        grace: float = 5.0,
    ) -> None:
        self.request = request
        self.signals = tuple(signals)
        self.received: int | None = None
        """The first signal that came to this process."""
        self._notice = None if notice is None else f"{notice}\n".encode()
        self._previous: dict[int, Any] = {}
        self._interrupted = False
        self._grace = grace
        self._handled = 0.0  # when a handler ran last
        self._arrivals: _Arrivals | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in self.signals:
            previous = signal.getsignal(signum)
            if previous is None or (signum == signal.SIGINT and previous is signal.SIG_IGN):
                continue  # None: installed by C code, which Python can't put back
            self._previous[signum] = previous
            signal.signal(signum, self._handle)
        if self._previous:
            self._arrivals = _Arrivals.listen(self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        previous, self._previous = self._previous, {}
        for signum, handler in previous.items():
            # Somebody who installed a handler in between keeps it.
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler)

    def _arrived(self, signum: int, first: float, now: float) -> None:
        """In a thread, with the time of the first signal of that number and of this one."""
        if signum not in self._previous or now - first < self.REPEAT:
            return
        here = _main_position()
        while time.monotonic() - now < self._grace:
            time.sleep(0.05)
            # the handler may have run before this thread did, and the main thread may wait in steps at one place
            if self._handled > now - 1.0 or _main_position() != here or not self._previous:
                return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
        write_stderr(
            f"torchhal: {signal.Signals(signum).name} came again {now - first:.0f} s after the first, and process "
            f"{os.getpid()}, which has not come back to Python since, leaves. It was at:\n{stack}"
        )
        leave(128 + signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._handled = time.monotonic()
        if self.received is None:
            self.received = signum
        if signum == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            if self._notice is not None:
                try:
                    os.write(2, self._notice)  # sys.stderr may be locked by what the signal interrupted
                except OSError:
                    pass
        self.request(signum)


class NotedSignals:
    """While entered, SIGINT and SIGTERM are noted, for a supervisor to pass on; only in the main thread, where they
    arrive."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> NotedSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                previous = signal.getsignal(signum)
                if previous is None or (signum == signal.SIGINT and previous is signal.SIG_IGN):
                    continue
                self._previous[signum] = previous
                signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)


def _main_position() -> tuple[int, int]:
    """Where the main thread is in Python: another value means that it runs."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


class _Arrivals:
    """A thread that is told of a signal when it arrives: C code writes its number to a pipe, whatever Python does."""

    def __init__(self, arrived: Callable[[int, float, float], object]) -> None:
        self._arrived = arrived
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # as set_wakeup_fd asks for

    @classmethod
    def listen(cls, arrived: Callable[[int, float, float], object]) -> _Arrivals | None:
        """None where somebody listens already, such as an event loop. In the main thread only."""
        arrivals = cls(arrived)
        before = signal.set_wakeup_fd(arrivals._writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(arrivals._reading)
            os.close(arrivals._writing)
            return None
        global _listening
        _listening = True
        threading.Thread(target=arrivals._run, name="torchhal-signals", daemon=True).start()
        return arrivals

    def close(self) -> None:
        """In the main thread."""
        global _listening
        _listening = False
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, self._writing):
            signal.set_wakeup_fd(now)  # somebody else has begun to listen since
        os.close(self._writing)  # which ends the thread

    def _run(self) -> None:
        first: dict[int, float] = {}
        while received := os.read(self._reading, 64):
            now = time.monotonic()
            for signum in received:
                self._arrived(signum, first.setdefault(signum, now), now)
        os.close(self._reading)


_listening = False


def _stop_listening() -> None:
    """In a forked child, a data-loading worker say: its signals are none of this process's."""
    global _listening
    if _listening:
        _listening = False
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_listening)
