"""Send the records of an outbox to a service, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Protocol

from torchhal_loggers._outbox import Line, Outbox, Record

_BATCH: Final = 500
_LONGEST_PAUSE_S: Final = 30.0
_IDLE_S: Final = 10.0
_STUCK: Final = 3
"""How often a record fails before it is tried whether the next ones go through."""

_OF_A_RECORD: Final = (FileNotFoundError, TypeError)
"""Errors that no service makes: a picture that is gone, a value that its library doesn't take."""


class Service(Protocol):
    """What a :class:`Sender` needs of a ``ServiceLogger``."""

    service: ClassVar[str]
    interval_s: ClassVar[float]
    writes_at_end: ClassVar[bool]

    def get_experiment(self) -> Any: ...
    def send(self, experiment: Any, records: Sequence[Record]) -> None: ...
    def end(self, experiment: Any, status: str) -> None: ...
    def is_refusal(self, error: Exception) -> bool: ...
    def record_rejected(self, record: Record, error: Exception) -> None: ...
    def with_absolute_paths(self, record: Record) -> Record: ...


class Sender:
    """A thread that connects to a service, sends it what is in the outbox, and goes on when the service was away.

    A record ``{"status": ...}`` ends the run at the service, unless others follow it already.

    Args:
        service: the logger that knows how to send.
        outbox: the records.

    Attributes:
        failure: the error of the newest attempt; None while the service answers.
    """

    def __init__(self, service: Service, outbox: Outbox) -> None:
        self.failure: BaseException | None = None
        self._service = service
        self._outbox = outbox
        self._changed = threading.Condition()
        self._has_work = False
        self._is_urgent = False
        self._is_last = False  # nobody logs any more, as far as is known
        self._attempt = 0
        self._failed_attempt = 0
        self._experiment: Any = None
        self._given = 0  # a place in the outbox: up to there the experiment has the records, maybe in memory only
        self._stuck_at = -1
        self._times_stuck = 0
        self._thread: threading.Thread | None = None
        self._at_work = threading.Lock()

    def wake(self) -> None:
        """Let the thread know that there are records. It waits a moment for more."""
        if not self._has_work or self._is_last or self._thread is None:
            with self._changed:
                self._has_work, self._is_last = True, False
                self._start()
                self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Send everything that is in the outbox; return whether that was done within ``timeout`` seconds.

        While the service is away, this waits for one more attempt. What isn't done by then is done later, or by another
        process.
        """
        target, end = self._outbox.size, time.monotonic() + timeout
        with self._changed:
            self._has_work = self._is_urgent = self._is_last = True
            self._start()
            attempt = self._attempt
            self._changed.notify_all()
            while self._outbox.sent < target and (left := end - time.monotonic()) > 0:
                if self._failed_attempt > attempt or self._thread is None:
                    break
                self._changed.wait(left)
            return self._outbox.sent >= target

    def suspend(self) -> bool:
        """End the experiment here, so that another logger can begin one; return whether that could be done now.

        The next record goes on in it.
        """
        if not self._at_work.acquire(blocking=False):
            return False
        try:
            if self._experiment is not None:  # the other one may hold sending(), being a copy
                self._end("interrupted", self._given)
        finally:
            self._at_work.release()
        return True

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"torchhal-{self._service.service}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # none can be had, or the interpreter ends: the next record tries again
                self.failure = error
            else:
                self._thread = thread

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                is_done = not self._changed.wait_for(lambda: self._has_work, _IDLE_S)
                if (is_done and not self._keeps_unsent()) or (self._is_last and pause >= _LONGEST_PAUSE_S):
                    self._thread = None  # the logger, and all that it holds, can go; or the next record starts another
                    return
                if is_done:
                    continue
                self._changed.wait_for(lambda: self._is_urgent, pause or self._service.interval_s)
                self._has_work = self._is_urgent = False
                self._attempt += 1
            failure: BaseException | None = None
            try:
                with self._at_work, self._outbox.sending():
                    self._send_all()
            except BaseException as error:  # a library's sys.exit, too
                failure, pause = error, min(_LONGEST_PAUSE_S, max(1.0, 2 * pause))
            else:
                pause = 0.0
            with self._changed:
                self.failure = failure
                if failure is not None:
                    self._has_work, self._failed_attempt = True, self._attempt
                self._changed.notify_all()

    def _keeps_unsent(self) -> bool:
        """Return whether the library has records that only :meth:`ServiceLogger.end` makes durable."""
        return self._service.writes_at_end and self._given > self._outbox.sent

    def _send_all(self) -> None:
        while lines := self._outbox.unsent(_BATCH, self._start_of_rest()):
            experiment = self._service.get_experiment()
            if experiment is not self._experiment:  # one that doesn't have what the one before kept in memory
                self._experiment, self._given = experiment, 0
                continue
            ends = [index for index, line in enumerate(lines) if line.record is not None and "status" in line.record]
            rest = [line for index, line in enumerate(lines) if index not in ends and line.record is not None]
            if rest:
                self._send(experiment, rest)
            last = lines[-1]
            if ends and ends[-1] == len(lines) - 1 and last.end == self._outbox.size:
                assert last.record is not None
                self._end(last.record["status"], last.end)
            else:
                self._mark(last.end)

    def _start_of_rest(self) -> int:
        return max(self._given, self._outbox.sent)

    def _mark(self, place: int) -> None:
        self._given = place
        if not self._service.writes_at_end:
            self._outbox.mark_sent(place)

    def _end(self, status: str, place: int) -> None:
        self._service.end(self._experiment, status)
        self._experiment = None  # or the logger would keep what a service's library has ended
        self._given = 0
        self._outbox.mark_sent(place)

    def _send(self, experiment: Any, lines: list[Line]) -> None:
        """Send in one go, or one by one where the service doesn't take them so."""
        try:
            self._service.send(experiment, [self._service.with_absolute_paths(line.record or {}) for line in lines])
        except Exception as error:
            if not self._is_refusal(error) and not self._is_stuck(lines[0], error):
                raise
            self._send_each(experiment, lines)

    def _send_each(self, experiment: Any, lines: list[Line]) -> None:
        """Send one by one, and pass over what the service refuses, or what fails where others go through."""
        suspects: list[tuple[Record, Exception]] = []
        for line in lines:
            record = line.record or {}
            try:
                answered = self._send_one(experiment, record)
            except Exception as error:
                if self._times_stuck < _STUCK:
                    raise
                suspects.append((record, error))
                continue
            if answered:
                self._send_again(experiment, suspects)
                suspects.clear()
            if not suspects:
                self._mark(line.end)
        if suspects:
            raise suspects[-1][1]

    def _send_again(self, experiment: Any, suspects: list[tuple[Record, Exception]]) -> None:
        """Send records that have failed, now that the service answers, and pass over those that fail again."""
        for record, error in suspects:
            try:
                self._send_one(experiment, record)
            except Exception:
                self._service.record_rejected(record, error)

    def _send_one(self, experiment: Any, record: Record) -> bool:
        """Send a record, or those of its values that the service doesn't refuse; return whether it took any."""
        try:
            self._service.send(experiment, [self._service.with_absolute_paths(record)])
        except Exception as error:
            if not self._is_refusal(error):
                raise
            if len(parts := _parts(record)) > 1:
                taken = [self._send_one(experiment, part) for part in parts]
                return any(taken)
            self._service.record_rejected(record, error)
            return False
        return True

    def _is_refusal(self, error: Exception) -> bool:
        return isinstance(error, _OF_A_RECORD) or self._service.is_refusal(error)

    def _is_stuck(self, line: Line, error: Exception) -> bool:
        """Return whether this record fails again and again, by an error that is none of the connection."""
        if isinstance(error, OSError):
            return False
        self._times_stuck = self._times_stuck + 1 if line.end == self._stuck_at else 1
        self._stuck_at = line.end
        return self._times_stuck >= _STUCK


def _parts(record: Record) -> list[Record]:
    """Return records of one value each, so that the service can refuse one and take the others."""
    kind = next((kind for kind in ("metrics", "text", "image", "params") if kind in record), None)
    if kind is None:
        return [record]
    return [{**record, kind: {name: value}} for name, value in record[kind].items()]
