"""Agree on the step at which all ranks stop on a signal."""

from __future__ import annotations

import time
from datetime import timedelta

from torchhal.distributed._monitor_base import MonitorBase, StopAgreement
from torchhal.distributed.rendezvous import DEFAULT_TIMEOUT
from torchhal.distributed.stores import Store, ranks_text
from torchhal.errors import CollectiveTimeoutError

_stop_is_agreed = False


def stop_is_agreed() -> bool:
    """Return whether the ranks of this process's last monitor have begun a stop agreement on a signal."""
    return _stop_is_agreed


def _set_stop_is_agreed(agreed: bool) -> None:
    global _stop_is_agreed
    _stop_is_agreed = agreed


def _first_choice(signums: list[int]) -> int | None:
    """Return the first signal, else the program's first request: a signal won't be sent again."""
    return next((signum for signum in signums if signum > 0), next(iter(signums), None))


class StopAgreements(MonitorBase):
    """The agreement of all ranks on the step at which they stop.

    A signal reaches one rank or some, at different points of a step; all must stop after the same step, and none may
    run a collective to find out. :meth:`request_stop` sets an attribute. The thread posts it, and every rank's
    thread, when it reads the post, sets :attr:`stop_requested` and *then* posts :attr:`steps_done`. When all positions
    are posted, all ranks stop at their highest plus one. The training loop does at each step boundary::

        watch.steps_done += 1
        if watch.stop_requested and (signum := watch.agree_on_stop_step()) is not None:
            ...  # every rank is here at the same position

    Why no rank passes the stop: suppose a thread posted p. If the main thread counted up after that, it reads the
    flag, set earlier, at boundary p + 1 and waits there for the agreement. If it counted up to p just before, it may
    have read the flag too early, runs one more step and waits at boundary p + 1. The agreed step is at least p + 1,
    so no rank is beyond it. Why no rank waits for ever: positions are posted by the threads, independently of the
    main threads. A rank that waits at its boundary while another is in a collective that needs it is released as soon
    as all threads have posted, and runs on to the agreed step; so does the other. Ranks take as many steps as each
    other, or set their positions to the largest where they did not, so all get there, or all reach the end of
    training first, where :meth:`agree_on_stop_at_end` returns the signal.
    """

    def request_stop(self, signum: int) -> None:
        """Request that all ranks stop at one step boundary. Safe in a signal handler: only sets attributes and appends.

        Each signal is agreed on once per monitor. Negative numbers are requests by the program; if both are pending,
        the signal takes precedence.
        """
        if signum not in self._wishes:
            self._wishes.append(signum)
        if self._store is None:
            self.stop_requested = True

    @property
    def stop_signal(self) -> int | None:
        """The signal on which all ranks have agreed to stop, perhaps at a later boundary."""
        if self._store is None:
            return _first_choice(self._wishes)
        return _first_choice([a.signum for a in self._agreements if a.stop_at is not None])

    def agree_on_stop_step(self, timeout: float = 60.0) -> int | None:
        """Return the signal to stop on at this :attr:`steps_done`, or None to go on.

        Waits while an agreement is pending.

        Args:
            timeout: seconds to wait for the agreement.

        Raises:
            RankFailedError: another rank has failed.
            CollectiveTimeoutError: there is no agreement within ``timeout`` seconds; names the unresponsive ranks.
        """
        if self._store is None:
            return _first_choice(self._wishes)
        start = time.monotonic()
        while True:
            self._raise_failure()
            with self._lock:
                pending = next((a for a in self._agreements if a.stop_at is None), None)
                agreed = [a for a in self._agreements if a.stop_at is not None and a.stop_at >= 0]
                if pending is None and not agreed:
                    self.stop_requested = False  # a stop that reached some rank too late
                    return None
            if pending is None:
                return _first_choice([a.signum for a in agreed if self.steps_done >= (a.stop_at or 0)])
            if time.monotonic() - start > timeout:
                missing = self._without_position(pending)
                self._all_dump(f"rank {self.rank} waited in vain for all ranks to agree where to stop")
                seen = self.hang.look_at(self._store, missing)
                raise CollectiveTimeoutError(
                    f"signal {pending.signum} asks for a stop, but {ranks_text(missing)} did not say within "
                    f"{timeout:g} s where it is: is the process stopped, or stuck in code that holds Python's lock?"
                    f"{self.hang.hint(seen)}",
                    name="stop",
                    missing=missing,
                )
            time.sleep(0.002)

    def agree_on_stop_at_end(self, timeout: timedelta = DEFAULT_TIMEOUT) -> int | None:
        """Return the signal that ends the job although training ended first; the same on all ranks.

        Every rank calls it once after its last boundary, while signals still call :meth:`request_stop`. A barrier.
        """
        if self._store is None:
            return _first_choice(self._wishes)
        self._post_wishes(self._store)
        # Events are numbered for all ranks alike, and the last rank to arrive posts the last one that counts.
        store = self._store
        count = int(self._meet("end of training", timeout, last_word=lambda: str(self._events.count(store))))
        events = [self._events.read(store, index) for index in range(1, count + 1)]
        signum = _first_choice([int(event["signum"]) for event in events if event.get("kind") == "stop"])
        if signum is not None and signum > 0:
            _set_stop_is_agreed(True)
        return signum

    def _post_wishes(self, store: Store) -> None:
        """Post the requested signals that were not posted yet; on return all are posted, by this thread or another."""
        with self._posting:
            for signum in list(self._wishes):
                if signum not in self._posted:
                    self._posted.add(signum)
                    self._events.post(store, {"kind": "stop", "signum": signum})

    def _advance(self, store: Store, agreement: StopAgreement) -> None:
        """Complete the agreement if all positions are posted, or if a rank has ended its work without posting one."""
        base = self._key(f"stop/{agreement.signum}")
        if store.add(f"{base}/count", 0) >= self.world_size:
            positions = store.multi_get([f"{base}/{rank}" for rank in range(self.world_size)])
            agreement.stop_at = max(int(position) for position in positions) + 1
            return
        now = time.monotonic()
        if now - agreement.looked > 0.5:
            agreement.looked = now
            # A rank posts before it signs off or never: all others reach the same result.
            ended = [rank for rank in range(self.world_size) if store.check([self._key(f"bye/{rank}")])]
            if any(not store.check([f"{base}/{rank}"]) for rank in ended):
                agreement.stop_at = -1

    def _pending(self) -> StopAgreement | None:
        return next((a for a in self._agreements if a.stop_at is None), None)

    def _without_position(self, agreement: StopAgreement) -> list[int]:
        assert self._store is not None
        base = self._key(f"stop/{agreement.signum}")
        return [rank for rank in range(self.world_size) if not self._store.check([f"{base}/{rank}"])]

    def _take_stop(self, store: Store, signum: int) -> None:
        """Open the agreement on ``signum`` and post this rank's position, once."""
        if any(agreement.signum == signum for agreement in self._agreements):
            return
        agreement = StopAgreement(signum)
        with self._lock:
            self._agreements.append(agreement)
            self.stop_requested = True  # first the flag, then the position: see the class's docstring
        if signum > 0:
            _set_stop_is_agreed(True)
        position = self.steps_done
        store.set(self._key(f"stop/{signum}/{self.rank}"), str(position))
        store.add(self._key(f"stop/{signum}/count"), 1)

    @staticmethod
    def _forget_agreement() -> None:
        _set_stop_is_agreed(False)
