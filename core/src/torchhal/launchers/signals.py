"""Signals that ask a job to stop: a handler sets a flag, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While entered, SIGTERM and the first SIGINT call ``request(signum)`` instead of ending the process.

    ``request`` runs inside a signal handler: it may set plain attributes and nothing more - no collective, no store,
    no lock (``RankWatch.request_stop`` is made for it). A second SIGINT raises KeyboardInterrupt at once. Leaving
    restores the previous handlers; those are not called in between. Outside the main thread, where Python has no
    signal handlers, it does nothing. A SIGINT that this process was started to ignore (``nohup``, a shell's ``&``)
    stays ignored.

    Args:
        request: called with the signal's number.
        signals: which signals ask for a stop; pass ``signal.SIGUSR1`` too where a scheduler warns with it.
        notice: written to stderr at the first SIGINT, e.g. what a second one does. None on ranks other than 0.
    """

    def __init__(
        self,
        request: Callable[[int], object],
        *,
        signals: Iterable[int] = DEFAULT_SIGNALS,
        notice: str | None = None,
    ) -> None:
        self.request = request
        self.signals = tuple(signals)
        self.received: int | None = None
        """The first signal that came to this process."""
        self._notice = None if notice is None else f"{notice}\n".encode()
        self._previous: dict[int, Any] = {}
        self._interrupted = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in self.signals:
            previous = signal.getsignal(signum)
            if previous is None or (signum == signal.SIGINT and previous is signal.SIG_IGN):
                continue  # None: installed by C code, which Python can't put back
            self._previous[signum] = previous
            signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        previous, self._previous = self._previous, {}
        for signum, handler in previous.items():
            # Somebody who installed a handler in between keeps it.
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
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
