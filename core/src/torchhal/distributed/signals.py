"""Signals that request a job's stop: during training a handler sets a flag, and before that it ends the run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import FrameType, TracebackType
from typing import Any, ClassVar

from torchhal.distributed.process import leave, write_descriptor_2, write_stderr

__all__ = [
    "SignalRecorder",
]

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(BaseException):
    """The exception that a signal raises in the main thread before there is anything to save."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def is_agreed(error: BaseException) -> bool | None:
    """Return the ``agreed`` of ``failures.exit_for_signal``; None for an error from elsewhere."""
    agreed: bool | None = error.__dict__.get(AGREED)
    return agreed


def signal_of(error: BaseException) -> int:
    """Return the signal on which ``failures.exit_for_signal`` made ``error``."""
    return int(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else error.code - 128  # type: ignore[attr-defined]


def is_orderly(error: BaseException) -> bool:
    """Return whether ``failures.exit_for_signal`` made ``error``: the stop was reported to the user."""
    return AGREED in error.__dict__


AGREED = "_torchhal_agreed"


class StopSignals:
    """A context in which SIGTERM and the first SIGINT call ``request(signum)`` instead of ending the process.

    ``request`` runs inside a signal handler: it may set plain attributes and nothing more - no collective, no store,
    no lock (``RankMonitor.request_stop`` is made for it). A second SIGINT raises KeyboardInterrupt at once. Leaving
    restores the previous handlers; those are not called in between. Outside the main thread, where Python has no
    signal handlers, it does nothing. A SIGINT that this process was started to ignore (``nohup``, a shell's ``&``)
    stays ignored. Of ``signals`` other than those two, one for which the program has installed a handler keeps its
    handler and requests nothing: see :attr:`kept`.

    Python calls a handler between two of its instructions: never while the main thread waits in C for a collective
    that no other rank enters. So the same signal once more ends the process, with 128 and its number, if the main
    thread is not back in Python ``grace`` seconds later. A signal within ``REPEAT`` seconds of the first is a
    duplicate of it: a scheduler signals the group and the launcher in it, which passes it on.

    Args:
        request: called with the signal's number.
        signals: which signals request a stop; pass ``signal.SIGUSR1`` too where a scheduler warns with it.
        notice: returns the text for stderr at the first SIGINT, e.g. the effect of a second one; called inside the
            handler. None on ranks other than 0.
        grace: see above, in seconds.
    """

    REPEAT = 2.0

    active: ClassVar[StopSignals | None] = None
    """The innermost context that this process has entered."""
    interrupted_pid: ClassVar[int | None] = None
    """The process that received a SIGINT inside such a context: this one, or one that it was forked from."""

    def __init__(
        self,
        request: Callable[[int], object],
        *,
        signals: Iterable[int] = DEFAULT_SIGNALS,
        notice: Callable[[], str] | None = None,
        grace: float = 5.0,
    ) -> None:
        self.request = request
        self.signals = tuple(signals)
        self.received: int | None = None
        """The first signal that this process received."""
        self.kept: list[int] = []
        """Those of ``signals`` that the program handles itself."""
        self._notice = notice
        self._previous: dict[int, Any] = {}
        self._interrupted = False
        self._grace = grace
        self._handled = 0.0  # when a handler ran last
        self._outer: StopSignals | None = None
        self._at_once = False
        self._raised = False
        self._arrivals: _Arrivals | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._outer, StopSignals.active = StopSignals.active, self
        for signum in self.signals:
            previous = signal.getsignal(signum)
            if previous is None or (signum == signal.SIGINT and previous is signal.SIG_IGN):
                continue  # None: installed by C code, which Python can't put back
            if _is_the_programs(signum, previous):
                self.kept.append(signum)
                continue
            self._previous[signum] = previous
            signal.signal(signum, self._handle)
        if self._previous:
            self._arrivals = _Arrivals.listen(self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if StopSignals.active is self:
            StopSignals.active = self._outer
        previous, self._previous = self._previous, {}
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        for signum, handler in previous.items():
            # A handler that other code has installed in between is kept.
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT raise :class:`StopRequested` in the main thread, once, and request nothing.

        For the time before training: the ranks have no common step yet at which they could stop, and there is nothing
        to save. If the main thread is in C, or swallows the exception, and is still in this context ``grace`` seconds
        later, or twice as many if the handler has run, the process exits with 128 and the signal's number. Other
        signals, by which a scheduler warns, still call ``request``.
        """
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def raise_received(self) -> None:
        """Raise :class:`StopRequested` for a SIGTERM or SIGINT that came since the start, outside :meth:`at_once`.

        Called in :meth:`at_once` before the ranks meet: the flag that the signal has set would be read at the first
        step, and another rank that the signal has ended would be waited for until then.
        """
        if self.received in DEFAULT_SIGNALS and not self._raised:
            self._raised = True
            raise StopRequested(self.received)

    def takes_at_once(self, signum: int) -> bool:
        """Return whether the main thread is inside :meth:`at_once`, handles ``signum`` and has not received one."""
        handled = signum in self._previous and hasattr(signal, "pthread_kill")
        return self._at_once and self.received is None and handled

    def awaits_interrupt(self) -> bool:
        """Return whether SIGINT is handled here and was not received yet: a second one would end the run at once."""
        return signal.SIGINT in self._previous and not self._interrupted

    def _arrived(self, signum: int, first: float, now: float) -> None:
        """Handle a signal in a thread, with the time of the first signal of that number and of this one."""
        if signum not in self._previous:
            return
        if self._at_once and signum in DEFAULT_SIGNALS:
            grace = self._grace if now - first < self.REPEAT else 0.5
            waiting = threading.Thread(target=self._await_end, args=(signum, now, grace), name="torchhal-stop")
            waiting.daemon = True
            waiting.start()
            return
        if now - first < self.REPEAT:
            return
        here = _main_position()
        while time.monotonic() - now < self._grace:
            time.sleep(0.05)
            # the handler may have run before this thread did, and the main thread may wait in steps at one place
            if self._handled > now - 1.0 or _main_position() != here or not self._previous:
                return
        _leave_from(signum, f"came again {now - first:.0f} s after the first, and has not reached Python since")

    def _await_end(self, signum: int, came: float, grace: float) -> None:
        """End the process if the main thread doesn't leave :meth:`at_once`."""
        while self._at_once:
            waited = time.monotonic() - came
            if waited > (2 * grace if self._handled >= came else grace):
                _leave_from(signum, f"came {waited:.0f} s ago, before training, and has not ended the run")
            time.sleep(0.05)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._handled = time.monotonic()
        if self.received is None:
            self.received = signum
        at_once = self._at_once and signum in DEFAULT_SIGNALS
        if signum == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted, StopSignals.interrupted_pid = True, os.getpid()
            if self._notice is not None and not at_once:
                # sys.stderr may be locked by the code that the signal interrupted
                write_descriptor_2(f"{self._notice()}\n".encode())
        if not at_once:
            self.request(signum)
        elif not self._raised:  # a scheduler signals the group and the launcher in it, which passes it on
            self._raised = True
            raise StopRequested(signum)


@contextmanager
def at_once() -> Iterator[None]:
    """Enter :meth:`StopSignals.at_once` of the instance active in this thread, if there is one."""
    signals = StopSignals.active
    if signals is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    with signals.at_once():
        yield


@contextmanager
def within_a_run() -> Iterator[None]:
    """Leave :func:`at_once` inside, where another run stops on the signals by itself, between two steps."""
    signals = StopSignals.active
    before = signals is not None and signals._at_once
    if signals is not None:
        signals._at_once = False
    try:
        yield
    finally:
        if signals is not None:
            signals._at_once = before


def follow(signum: int) -> None:
    """Send the main thread the signal on which another rank leaves, if it is inside :func:`at_once`. In any thread."""
    signals = StopSignals.active
    main = threading.main_thread().ident
    if signals is not None and signals.takes_at_once(signum) and main is not None:
        signal.pthread_kill(main, signum)


def interrupt() -> None:
    """Send the main thread the SIGINT that the launching process received.

    It is not sent if this process received it too, as with a terminal's Ctrl-C.

    May be called in any thread. Where no handler of torchhal's is installed, the process ends without a message; one
    that received its own during a fit has stopped already, and ends by itself.
    """
    signals = StopSignals.active
    main = threading.main_thread().ident
    if signals is None or main is None or not hasattr(signal, "pthread_kill"):
        if StopSignals.interrupted_pid != os.getpid():
            os.kill(os.getpid(), signal.SIGTERM)
    elif signals.awaits_interrupt():
        signal.pthread_kill(main, signal.SIGINT)


class SignalRecorder:
    """A record of SIGINT, SIGTERM and ``also`` while it is entered, for a supervisor to forward.

    Only in the main thread, which receives them. A signal of ``also`` with a handler of the program keeps that handler.
    """

    def __init__(self, also: Iterable[int] = ()) -> None:
        self.received: list[int] = []
        self._signals = (*DEFAULT_SIGNALS, *also)
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalRecorder:
        if threading.current_thread() is threading.main_thread():
            for signum in self._signals:
                previous = signal.getsignal(signum)
                if previous is None or (signum == signal.SIGINT and previous is signal.SIG_IGN):
                    continue
                if _is_the_programs(signum, previous):
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


def _is_the_programs(signum: int, handler: Any) -> bool:
    """Return whether the program handles ``signum`` itself; its handlers of SIGTERM and SIGINT don't count here.

    Neither an outer fit's handler nor a supervisor's, which a forked worker inherits, is the program's.
    """
    ours = isinstance(getattr(handler, "__self__", None), StopSignals | SignalRecorder)
    return signum not in DEFAULT_SIGNALS and callable(handler) and not ours


@contextmanager
def born_blocked(start_method: str = "fork") -> Iterator[None]:
    """Start processes inside it that have SIGTERM and SIGINT blocked until they call :func:`unblock`.

    An interpreter that is interrupted while it starts ends with 1 and a traceback of its own modules, and one that a
    fork made has its parent's handlers at first. ``start_method`` is multiprocessing's, if that starts them.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if start_method != "fork":
        resource_tracker.ensure_running()  # starts with the first such process, and unblocks the signals on its way
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DEFAULT_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_pending(pid: int, signum: int) -> bool:
    """Return whether the process has that signal blocked and pending; False where /proc doesn't report it."""
    try:
        with open(f"/proc/{pid}/status") as status:
            masks = [line.split()[1] for line in status if line.startswith("ShdPnd:")]
    except OSError:
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (signum - 1) & 1)


def unblock() -> None:
    """Unblock the signals that :func:`born_blocked` has blocked."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, DEFAULT_SIGNALS)


def _leave_from(signum: int, what: str) -> None:
    """End the process, from any thread, and print its main thread's position."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
    write_stderr(f"torchhal: {signal.Signals(signum).name} {what}: process {os.getpid()} leaves. It was at:\n{stack}")
    leave(128 + signum)


def _main_position() -> tuple[int, int]:
    """Return the main thread's position in Python; a changed value means that it is running."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


class _Arrivals:
    """A thread that is notified when a signal arrives: C code writes its number to a pipe, whatever Python runs."""

    def __init__(self, arrived: Callable[[int, float, float], object]) -> None:
        self._arrived = arrived
        self._thread: threading.Thread | None = None
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # as set_wakeup_fd requires

    @classmethod
    def listen(cls, arrived: Callable[[int, float, float], object]) -> _Arrivals | None:
        """Start to listen; None where other code listens already, such as an event loop. In the main thread only."""
        arrivals = cls(arrived)
        before = signal.set_wakeup_fd(arrivals._writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(arrivals._reading)
            os.close(arrivals._writing)
            return None
        global _listening
        _listening = True
        arrivals._thread = threading.Thread(target=arrivals._run, name="torchhal-signals", daemon=True)
        arrivals._thread.start()
        return arrivals

    def close(self) -> None:
        """End the thread; it has ended on return. In the main thread only."""
        global _listening
        _listening = False
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, self._writing):
            signal.set_wakeup_fd(now)  # other code has begun to listen since
        with suppress(BlockingIOError):
            os.write(self._writing, _END)  # a forked child may have the pipe, too, and keep it open
        os.close(self._writing)
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        first: dict[int, float] = {}
        while received := os.read(self._reading, 64):
            now = time.monotonic()
            for signum in received:
                if signum == _END[0]:
                    os.close(self._reading)
                    return
                self._arrived(signum, first.setdefault(signum, now), now)
        os.close(self._reading)


_END = b"\0"  # no signal has this number

_listening = False


def _stop_listening() -> None:
    """Stop listening in a forked child, such as a data-loading worker: its signals are not this process's."""
    global _listening
    if _listening:
        _listening = False
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_listening)
