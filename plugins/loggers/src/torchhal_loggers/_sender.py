"""Send the records of an outbox to a service, in a thread of its own."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar, Final, Protocol

from torchhal_loggers._outbox import Outbox, Record

_BATCH: Final = 500
_LONGEST_PAUSE_S: Final = 30.0
_IDLE_S: Final = 10.0


class Service(Protocol):
    """What a :class:`Sender` needs of a ``ServiceLogger``."""

    service: ClassVar[str]
    interval_s: ClassVar[float]
    writes_at_end: ClassVar[bool]

    @property
    def was_connected(self) -> bool: ...
    def connected(self) -> Any: ...
    def send(self, experiment: Any, records: list[Record]) -> None: ...
    def end(self, experiment: Any, status: str) -> None: ...
    def is_refusal(self, error: Exception) -> bool: ...
    def refuse(self, record: Record, error: Exception) -> None: ...


class Sender:
    """A thread that connects to a service, sends it what is in the outbox, and goes on when the service was away.

    Args:
        service: the logger that knows how to send.
        outbox: the records.

    Attributes:
        failure: the error of the newest attempt; None while the service answers.
    """

    def __init__(self, service: Service, outbox: Outbox) -> None:
        self.failure: Exception | None = None
        self._service = service
        self._outbox = outbox
        self._changed = threading.Condition()
        self._has_work = False
        self._is_urgent = False
        self._status: str | None = None  # to end the run with, once everything is sent
        self._attempts = 0  # that have ended, well or not
        self._given: int | None = None  # a place in the outbox: up to there the service has the records in memory only
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Let the thread know that there are records. It waits a moment for more."""
        if not self._has_work or self._status is not None:
            with self._changed:
                self._has_work, self._status = True, None
                self._start()
                self._changed.notify_all()

    def drain(self, timeout: float, status: str) -> bool:
        """Send everything and end the run at the service; return whether that was done within ``timeout`` seconds.

        While the service is away, this waits for one more attempt. What isn't done by then is done later.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._has_work = self._is_urgent = True
            self._status = status
            self._start()
            attempts = self._attempts
            self._changed.notify_all()
            while self._status is not None and (left := end - time.monotonic()) > 0:
                if self._attempts > attempts and self.failure is not None:
                    break
                self._changed.wait(left)
            return self._status is None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"torchhal-{self._service.service}", daemon=True)
            self._thread.start()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._has_work, _IDLE_S):
                    self._thread = None  # the logger, and all that it holds, can go; or the next record starts another
                    return
                self._changed.wait_for(lambda: self._is_urgent, pause or self._service.interval_s)
                self._has_work = self._is_urgent = False
            try:
                with self._outbox.sending():
                    self._send_all()
                    if (status := self._status) is not None:
                        self._end(status)
            except Exception as error:
                self.failure, pause = error, min(_LONGEST_PAUSE_S, max(1.0, 2 * pause))
            else:
                self.failure, pause = None, 0.0
            with self._changed:
                self._attempts += 1
                if self.failure is not None:
                    self._has_work = True
                elif status is not None and self._status == status:
                    self._status = None
                self._changed.notify_all()

    def _send_all(self) -> None:
        while True:
            records, place = self._outbox.unsent(_BATCH, self._given)
            if not records:
                return
            experiment = self._service.connected()
            self._send(experiment, records)
            if self._service.writes_at_end:
                self._given = place
            else:
                self._outbox.mark_sent(place)

    def _end(self, status: str) -> None:
        if self._service.was_connected:
            self._service.end(self._service.connected(), status)
            if self._given is not None:
                self._outbox.mark_sent(self._given)
                self._given = None

    def _send(self, experiment: Any, records: list[Record]) -> None:
        """Send in one go, or one by one where the service refuses some of them."""
        try:
            self._service.send(experiment, records)
        except Exception as error:
            if not self._service.is_refusal(error):
                raise
            if len(records) == 1:
                self._service.refuse(records[0], error)
                return
            for record in records:
                self._send(experiment, [record])
