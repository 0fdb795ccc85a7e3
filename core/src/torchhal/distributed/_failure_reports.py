"""Report failures between ranks, and attribute the errors that they cause on other ranks."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

from torchhal.distributed import _flight_recorder as flight_recorder
from torchhal.distributed import failures
from torchhal.distributed._process_inspection import Presence
from torchhal.distributed._stop_agreement import StopAgreements
from torchhal.distributed.failures import Failure
from torchhal.distributed.signals import StopRequested, is_agreed, is_orderly
from torchhal.distributed.stores import first_line, ranks_text
from torchhal.errors import CollectiveTimeoutError, DistributedError, RankFailedError, TorchhalError


class FailureReports(StopAgreements):
    """The failures posted by ranks, and the errors attributed to them."""

    def report_failure(self, error: BaseException) -> None:
        """Post this rank's failure; call it as soon as ``error`` is caught, before any tear-down. Never raises.

        Nothing is posted for an error that another rank's failure caused (RankFailedError), for an exit on an agreed
        signal, or twice.
        """
        self._back = True
        if self._own is not None or self._store is None:
            return
        if isinstance(error, RankFailedError):
            self._discover()  # no other process reports a rank that ended without posting
            return
        if isinstance(error, (SystemExit, KeyboardInterrupt)) and (self.stop_signal is not None or is_agreed(error)):
            if isinstance(error, KeyboardInterrupt) and not is_orderly(error):  # a second Ctrl-C, ahead of that step
                self.report_stop(signal.SIGINT)
            return  # agreed at a step boundary, or at the end of training
        if isinstance(error, StopRequested):  # during set-up
            self.report_stop(error.signum)
            return
        announce = self._announce and not failures.was_printed(error)
        failure = Failure.from_exception(self.rank, error, printed=announce)
        self._own = failure
        self._discover()
        if self._lost is None:
            try:
                self._events.post(self._store, {"kind": "failure", "failure": failure.to_json().decode()})
            except RuntimeError:
                pass  # no store, no listeners
        if announce:
            failures.print_failure(failure)
            failures.mark_printed(error)

    def report_stop(self, signum: int) -> None:
        """Post that this rank leaves on ``signum`` before training, where the ranks have no step to agree on.

        The others get RankFailedError with that ``stop_signal``; a rank whose main thread doesn't return is ended by
        its thread. Never raises.
        """
        self._back = True
        if self._own is not None or self._store is None:
            return
        self._own = Failure.from_signal(self.rank, signum)
        self._note_end()
        if self._lost is None:
            try:
                self._events.post(self._store, {"kind": "failure", "failure": self._own.to_json().decode()})
            except RuntimeError:
                pass  # no store, no listeners

    def report_for(self, failure: Failure) -> None:
        """Report another rank's failure, for a launcher whose child process has ended. Any thread may call it."""
        if failure.rank == self.rank or self._failure is not None:
            return
        self._outbox.append({"kind": "failure", "failure": failure.to_json().decode()})
        self._learn(failure)
        self._wake.set()

    def root_cause(self, timeout: float = 3.0) -> Failure | None:
        """Return the earliest failure that another rank reported, waiting up to ``timeout`` seconds for one."""
        deadline = time.monotonic() + timeout
        while self._failure is None and self._lost is None and self._thread is not None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return self._failure

    def explain(self, error: BaseException, timeout: float = 3.0, *, name: str = "") -> BaseException:
        """Return the error to raise for ``error``: itself, or the failure of another rank that caused it.

        A "connection closed" or time-out of the process group is a consequence. For one of these, wait for another
        rank's report: RankFailedError with its traceback. After a time-out without a report:
        CollectiveTimeoutError with the ranks that did not time out themselves - those hang. A rank that no longer
        responds is named as gone.

        Args:
            error: what this rank's collective raised.
            timeout: seconds to wait for a report.
            name: the operation that raised; without it torch's last collective is named.

        Returns:
            ``error``, or another one whose ``__cause__`` is ``error``.
        """
        if self._store is None or isinstance(error, TorchhalError) or not failures.is_transport_error(error):
            return error
        self._back = True
        self.hang.caught = (threading.get_ident(), error.__traceback__) if error.__traceback__ else None
        name = name or flight_recorder.last() or "collective"
        timed_out = failures.is_timeout(error)
        token = f"{self.rank}/{time.monotonic_ns()}"
        if self._thread is not None:  # that thread may hang in an unresponsive store, this one must not
            self._outbox.append({"kind": "waited", "rank": self.rank, "timed_out": timed_out})
            self._outbox.append({"kind": "ping", "token": token})
            self._wake.set()
        if timed_out:
            self._all_dump(f"{name} timed out on rank {self.rank}")
        result = self._explanation(error, timed_out, token, timeout, name)
        if result is not error:
            result.__cause__ = error
        return result

    def _explanation(
        self, error: BaseException, timed_out: bool, token: str, timeout: float, name: str
    ) -> BaseException:
        failure = self.root_cause(timeout)
        while failure is None and self._lost is None and self._thread is not None and self._is_behind():
            time.sleep(0.02)  # the guard gives up on the store soon
        failure = failure or self._failure
        if failure is not None:
            if failure.aborted:
                self._all_dump(f"rank {failure.rank} {failure.message}")
                failure = replace(failure, message=failure.message + self.hang.hint({}))
            return failure.error()
        if self._lost is not None:
            return self._store_lost_error()
        self._all_dump(f"{name} failed on rank {self.rank}: {first_line(error)}")
        silent = self._silent(token)
        if silent:
            return self._silent_ranks_error(silent)
        others = set(range(self.world_size)) - {self.rank}
        # a rank that timed out too, only earlier, has not ended because its work was done
        ended = [rank for rank in sorted(others - set(self._waited)) if self._has_left(rank)]
        for rank in ended:
            if (left_on := self._left_on(rank)) is not None:
                return left_on.error()
            self.hang.write_for(rank, "it has ended its work")
        missing = ended or sorted(others - set(self._waited))
        over = [self.rank] if timed_out else sorted(rank for rank, its_time in self._waited.items() if its_time)
        if not over and not ended:
            return DistributedError(
                f"{name} failed on rank {self.rank} ({first_line(error)}), and no rank says why. Do all ranks call the "
                f"same collectives in the same order, with tensors of the same sizes?{self._hint(sorted(others))}"
            )
        if ended:
            who = f"{ranks_text(ended)} has ended its work"
        elif missing:
            who = f"{ranks_text(missing)} did not take part"
        else:
            who = "every rank waited for another collective"
        what = "timed out" if timed_out else "failed" if ended else f"ended, as that of {ranks_text(over)} timed out,"
        return CollectiveTimeoutError(
            f"{name} {what} on rank {self.rank}: {who}. Do all ranks call the same collectives in the same order (no "
            "logging, saving or barrier under 'if rank == 0'), and is none of them stuck?"
            f"{self._hint(missing or sorted(others))}",
            name=name,
            missing=missing,
        )

    def _silent_ranks_error(self, silent: list[int]) -> RankFailedError:
        """Name ranks that don't respond, with only as much of the cause as is visible from this process."""
        assert self._store is not None
        seen = self.hang.look_at(self._store, silent)
        try:
            unready = [rank for rank in silent if not self.hang.is_introduced(self._store, rank)]
        except RuntimeError:
            unready = []
        text = f"{ranks_text(silent)} is gone without a word"
        if unready == silent:
            text = f"{ranks_text(silent)} has not come out of its set-up, and does not say why: see its own output"
        elif all(rank in seen and seen[rank].presence is Presence.GONE for rank in silent):
            text += ": killed (too little memory?), or ended by C code. No other rank reported a failure"
        elif any(rank in seen and seen[rank].presence is not Presence.ELSEWHERE for rank in silent):
            text += ", though its process is there, see below. No rank reported a failure"
        else:
            text += (
                ": its machine can't be looked at from here. It was killed (too little memory?), or its process or "
                "machine is stopped. No other rank reported a failure"
            )
        return RankFailedError(f"{text}.{self.hang.hint(seen)}", rank=silent[0])

    def _left_on(self, rank: int) -> Failure | None:
        """Return the error with which a rank has left its loop."""
        assert self._store is not None
        try:
            data = self._store.get(self._key(f"bye/{rank}"))
        except RuntimeError:
            return None
        return Failure.from_json(data) if data else None

    def _silent(self, token: str) -> list[int]:
        """Return ranks whose thread neither answered the ping nor signed off."""
        assert self._store is not None
        try:
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            return [
                rank
                for rank in others
                if not self._store.check([self._key(f"pong/{token}/{rank}")]) and not self._has_left(rank)
            ]
        except RuntimeError:
            return []
