"""Hold the store, the known failures and the barriers of a rank monitor."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchhal.distributed import failures
from torchhal.distributed._barrier import NamedBarriers
from torchhal.distributed._hang_dump import HangDump
from torchhal.distributed._rendezvous_state import drop_store, is_hosted_by_rank_0, no_linger, store_host
from torchhal.distributed.failures import Failure
from torchhal.distributed.rendezvous import DEFAULT_TIMEOUT
from torchhal.distributed.signals import follow
from torchhal.distributed.stores import EventLog, Store, first_line, ranks_text
from torchhal.errors import CollectiveTimeoutError, DistributedError, TorchhalError


class StopAgreement:
    """One signal and the ranks' agreement on the step to stop after."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.started = time.monotonic()
        self.looked = self.started
        self.stop_at: int | None = None


class MonitorBase:
    """The store, the known failures and the barriers of a rank monitor: see :class:`RankMonitor`."""

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        *,
        prefix: str = "watch",
        interval: float = 0.25,
        grace: float = 5.0,
        limit: float = 12.0,
        silence: float = 3.0,
        announce: bool | None = None,
    ) -> None:
        if world_size > 1 and store is None:
            raise ValueError(f"'store' must be a store for a world of {world_size} (got None)")
        self.rank = rank
        self.world_size = world_size
        self.pid = os.getpid()
        self.steps_done = 0
        """Step boundaries passed; the training loop counts it up."""
        self.stop_requested = False
        """True if :meth:`agree_on_stop_step` has to be called at the next step boundary."""
        self.interval, self.grace, self.limit, self.silence = interval, grace, limit, silence
        self._announce = not failures.supervised if announce is None else announce
        self._prefix = prefix
        self._store = store if world_size > 1 else None
        self._thread_store: Store | None = None
        self._thread: threading.Thread | None = None
        self._guardian: threading.Thread | None = None
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._looks = 0  # finished
        self._looking = False
        self._meet_until: float | None = None  # deadline of the main thread's wait in the store
        self._stopping = False
        self._lock = threading.Lock()
        self._outbox: list[dict[str, Any]] = []
        self._seen = 0  # number of events read
        self._failure: Failure | None = None  # earliest failure of another rank
        self._own: Failure | None = None
        self._lost: str | None = None  # why the store was lost
        self._discovered: float | None = None
        self._back = False  # the main thread has received the failure
        self._wishes: list[int] = []  # appended to by signal handlers
        self._posted: set[int] = set()
        self._posting = threading.Lock()
        self._agreements: list[StopAgreement] = []
        self._waited: dict[int, bool] = {}
        """Ranks whose collective ended without the others, and whether it had timed out."""
        self.hang = HangDump(rank, world_size, self._key)
        self._events = EventLog(f"{prefix}/event")
        self._barriers: NamedBarriers | None = None
        if self._store is not None:
            self._barriers = NamedBarriers(
                self._store,
                rank,
                world_size,
                prefix=f"{prefix}/barrier",
                gone=lambda other: self._key(f"bye/{other}"),
                check=self._raise_failure,
            )

    def barrier(self, name: str, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Return when all ranks have reached their barrier of this name, each counting its own calls.

        Raises:
            CollectiveTimeoutError: ``missing`` did not arrive; the message names the barriers they are in instead.
            RankFailedError: another rank failed meanwhile.
        """
        if self._store is not None:
            self._meet(name, timeout)

    def _meet(self, name: str, timeout: timedelta, last_word: Callable[[], str] | None = None) -> str:
        assert self._barriers is not None
        self._meet_until = time.monotonic() + timeout.total_seconds()
        before, self.hang.doing = self.hang.doing, f"barrier {name!r}"
        try:
            return self._barriers.meet(name, timeout, last_word)
        except CollectiveTimeoutError as error:
            self._all_dump(f"barrier {name!r} ended without {ranks_text(list(error.missing))} on rank {self.rank}")
            raise CollectiveTimeoutError(
                f"{error}{self._hint(list(error.missing))}", name=name, missing=error.missing
            ) from None
        except RuntimeError as error:
            if isinstance(error, TorchhalError):
                raise
            self._lost = self._lost or first_line(error)
            raise (self._failure.error() if self._failure else self._store_lost_error()) from error
        finally:
            self._meet_until = None
            self.hang.doing = before

    def _all_dump(self, why: str) -> None:
        """Request a dump from every rank; this one writes now."""
        if self._thread is None:
            return
        if not self.hang.written:  # else this rank or another has requested it already
            self._outbox.append({"kind": "hang", "rank": self.rank, "why": why})
            self._wake.set()
        self.hang.write(why, self.steps_done)  # if the monitor's thread is about to write, returns when it has

    def _hint(self, ranks: list[int], timeout: float = 2.0) -> str:
        """Return the end of an error's message: the positions of ``ranks``, and the dump to read."""
        try:
            places = {} if self._store is None else self.hang.places(self._store, ranks, timeout)
        except RuntimeError:
            places = {}
        return self.hang.hint(places)

    def _has_left(self, rank: int) -> bool:
        assert self._store is not None
        try:
            return bool(self._store.check([self._key(f"bye/{rank}")]))
        except RuntimeError:
            return False

    def _is_behind(self) -> bool:
        """Return whether the thread still has to post something, or is waiting for the store."""
        return bool(self._outbox) or self._looking

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            drop_store()
            self._discover()

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            if failure.stop_signal:
                follow(failure.stop_signal)
        self._discover()

    def _discover(self) -> None:
        no_linger()
        self._note_end()

    def _note_end(self) -> None:
        if self._discovered is None:
            self._discovered = time.monotonic()
        self.stop_requested = True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._back = True
            raise self._failure.error()
        if self._lost is not None:
            self._back = True
            raise self._store_lost_error()

    def _store_lost_error(self) -> DistributedError:
        self.hang.write(f"rank {self.rank} lost its connection to {store_host()}", self.steps_done)
        seen = self.hang.look_at(None, [0]) if is_hosted_by_rank_0() else {}
        return DistributedError(f"{self._store_lost()}{self.hang.hint(seen)}")

    def _store_lost(self) -> str:
        return (
            f"rank {self.rank} lost its connection to {store_host()} ({self._lost}): that process has died or is "
            "stopped, or its machine can't be reached any more"
        )

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
