"""One thread per rank that knows what the others know: who failed, who asks for a stop, who is missing."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torchhal.distributed import _flight_recorder as flight_recorder
from torchhal.distributed import failures, rendezvous
from torchhal.distributed._barrier import NamedBarriers
from torchhal.distributed._hang_dump import HangDump
from torchhal.distributed._process_inspection import Presence
from torchhal.distributed.failures import Failure
from torchhal.distributed.process import leave, write_stderr
from torchhal.distributed.rendezvous import DEFAULT_TIMEOUT, store_host
from torchhal.distributed.signals import StopRequested, StopSignals, follow
from torchhal.distributed.stores import EventLog, Store, first_line, own_connection, ranks_text
from torchhal.errors import CollectiveTimeoutError, DistributedError, RankFailedError, TorchhalError

__all__ = ["RankMonitor", "StopSignals", "active_watches"]

_active: weakref.WeakSet[RankMonitor] = weakref.WeakSet()


def active_watches() -> list[RankMonitor]:
    """The watches of this process that are started: a launcher tells them of processes that died."""
    return [watch for watch in _active if watch.pid == os.getpid()]


def _report_uncaught(error: BaseException) -> None:
    """Tell the other ranks of an error that ends this process in the midst of a run, as a loop of one's own may."""
    for watch in active_watches():
        watch.report_failure(error)


def _stop_at_exit() -> None:
    """A process that ends without a tear-down has ended all the same, and was not killed."""
    for watch in active_watches():
        watch.stop()


failures.uncaught.append(_report_uncaught)
_exit_registered_in = 0
"""Process in which :func:`_stop_at_exit` is registered; a worker has none of its parent's exit handlers."""


_stop_is_agreed = False


def stop_is_agreed() -> bool:
    """Whether the ranks of this process's last watch have begun to agree on where to stop on a signal."""
    return _stop_is_agreed


def _agree() -> None:
    global _stop_is_agreed
    _stop_is_agreed = True


def _first_choice(signums: list[int]) -> int | None:
    """The first signal, else the first wish of the program's own: who sent a signal won't send it again."""
    return next((signum for signum in signums if signum > 0), next(iter(signums), None))


class _Agreement:
    """One signal on which the ranks agree where to stop."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.started = time.monotonic()
        self.looked = self.started
        self.stop_at: int | None = None


class RankMonitor:
    """What the ranks tell each other beside their collectives.

    Started after the process group is set up, stopped before it is destroyed. The thread has its own connection to
    the store and looks every ``interval`` seconds at one counter: a round trip per look, whatever the world's size.
    In a world of one there is no thread and no store, and everything still works.

    **Failure.** :meth:`report_failure` posts a rank's traceback before it tears anything down; :meth:`explain` turns
    the "connection closed" that the others get into RankFailedError with that traceback. A rank whose main thread
    doesn't come back within ``grace`` seconds of a failure elsewhere - it hangs in a collective, in a sleep, in C -
    is ended by its thread. None outlives ``limit`` seconds.

    **Stop.** A signal reaches one rank or some, at different points of a step; all must stop after the same step, and
    none may run a collective to find out. :meth:`request_stop` sets an attribute. The thread posts it, and every
    rank's thread, when it reads of it, raises :attr:`stop_requested` and *then* posts :attr:`steps_done`. When all
    positions are posted, all ranks stop at their highest plus one. The training loop does at each step boundary::

        watch.steps_done += 1
        if watch.stop_requested and (signum := watch.agree_on_stop_step()) is not None:
            ...  # every rank is here at the same position

    Why nobody passes the stop: say a thread posted p. If the main thread counted up after that, it sees the flag,
    raised earlier, at boundary p + 1 and waits there for the agreement. If it counted up to p just before, it may
    have looked at the flag too early, runs one more step and waits at boundary p + 1. The agreed step is at least
    p + 1, so no rank is beyond it. Why nobody waits for ever: positions are posted by the threads, whatever the main
    threads do. A rank that waits at its boundary while another sits in a collective that needs it is released as
    soon as all threads have posted, and runs on to the agreed step; so does the other. Ranks take as many steps as
    each other, or set their positions to the largest where they did not, so all get there, or all reach the end of
    training first, where :meth:`agree_on_stop_at_end` tells them.

    **Barrier.** :meth:`barrier` names who is missing and where it is instead.

    **Hang.** Where ranks wait in vain - a barrier or collective times out, a connection closes or a process aborts
    and nobody says why - every rank writes down where it is, see :class:`HangDump`, and the error says where to read.

    Args:
        store: the process group's store, as ``next_generation`` gave it.
        prefix: put before all keys, so that a store may carry something else too.
        silence: seconds without an answer of the store after which a rank whose wait is over gives up on it.
        announce: print this rank's own failure to stderr when it is reported; None: unless a supervisor prints it.
    """

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
        """Whether :meth:`agree_on_stop_step` has something to say."""
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
        self._meet_until: float | None = None  # the main thread waits in the store, at most until then
        self._stopping = False
        self._lock = threading.Lock()
        self._outbox: list[dict[str, Any]] = []
        self._seen = 0  # events read
        self._failure: Failure | None = None  # the earliest of another rank
        self._own: Failure | None = None
        self._lost: str | None = None  # why the store is gone
        self._discovered: float | None = None
        self._back = False  # the main thread knows of the failure
        self._wishes: list[int] = []  # appended to by signal handlers
        self._posted: set[int] = set()
        self._posting = threading.Lock()
        self._agreements: list[_Agreement] = []
        self._waited: dict[int, bool] = {}
        """Ranks whose collective ended without the others, and whether their time was over."""
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

    # -- life ------------------------------------------------------------------------------------------------

    def start(self) -> RankMonitor:
        """Start the thread; idempotent."""
        global _stop_is_agreed
        if self._store is not None and self._thread is None:
            _stop_is_agreed = False
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
        """End the thread and say goodbye: from now on nobody expects this rank. Idempotent, never raises.

        Args:
            error: on which this rank leaves. No failure of the job by itself, for its caller may have expected it; a
                rank that misses this one hears of it.
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
            thread.join(timeout=5.0 if self._lost is None else 0.1)  # it may be stuck in a store that is silent
        if self._lost is None:
            try:
                said = "" if error is None else Failure.from_exception(self.rank, error).to_json().decode()
                self._store.set(self._key(f"bye/{self.rank}"), said)
            except RuntimeError:  # the host is gone: nobody left to tell
                pass

    def __enter__(self) -> RankMonitor:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- failure ---------------------------------------------------------------------------------------------

    def report_failure(self, error: BaseException) -> None:
        """Post this rank's failure. Call it as soon as ``error`` is caught, before any tear-down. Never raises.

        Nothing is posted for an error that another rank's failure caused (RankFailedError), for an exit on an agreed
        signal, or twice.
        """
        self._back = True
        if self._own is not None or self._store is None:
            return
        if isinstance(error, RankFailedError):
            self._discover()  # of a rank that is gone without a word nobody else will say it
            return
        if isinstance(error, (SystemExit, KeyboardInterrupt)) and self.stop_signal is not None:
            return
        if isinstance(error, StopRequested):  # in the midst of a set-up
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

        The others get RankFailedError with that ``stop_signal``, and their threads end who doesn't come back. Never
        raises.
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
        """Report another rank's failure: for the launcher that saw its process die. Any thread may call it."""
        if failure.rank == self.rank or self._failure is not None:
            return
        self._outbox.append({"kind": "failure", "failure": failure.to_json().decode()})
        self._learn(failure)
        self._wake.set()

    def root_cause(self, timeout: float = 3.0) -> Failure | None:
        """The earliest failure that another rank reported, waiting up to ``timeout`` seconds for one."""
        deadline = time.monotonic() + timeout
        while self._failure is None and self._lost is None and self._thread is not None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return self._failure

    def explain(self, error: BaseException, timeout: float = 3.0, *, name: str = "") -> BaseException:
        """What to raise for ``error``: itself, or the failure of another rank that is behind it.

        A "connection closed" or time-out of the process group is a consequence. For one of these, wait up to
        ``timeout`` seconds for another rank's report: RankFailedError with its traceback. After a time-out that
        nobody explains: CollectiveTimeoutError with the ranks that did not run into one themselves - those hang. A
        rank that answers nothing any more is named as gone. The result's ``__cause__`` is ``error``; ``name`` is what
        the rank was doing, else torch's last collective is named.
        """
        if self._store is None or isinstance(error, TorchhalError) or not failures.is_transport_error(error):
            return error
        self._back = True
        self.hang.caught = (threading.get_ident(), error.__traceback__) if error.__traceback__ else None
        name = name or flight_recorder.last() or "collective"
        timed_out = failures.is_timeout(error)
        token = f"{self.rank}/{time.monotonic_ns()}"
        if self._thread is not None:  # that thread may hang in a silent store, this one must not
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
        # who waited in vain, too, and had done with it sooner, has not ended because it had done its work
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
        """Name ranks that answer nothing, and say of what only as much as can be seen from here."""
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

    # -- hang ------------------------------------------------------------------------------------------------

    def _all_dump(self, why: str) -> None:
        """Have every rank write down where it is, this one now."""
        if self._thread is None:
            return
        if not self.hang.written:  # else another rank has asked, or this one
            self._outbox.append({"kind": "hang", "rank": self.rank, "why": why})
            self._wake.set()
        self.hang.write(why, self.steps_done)  # returns when the watch's thread has written, if it is about to

    def _hint(self, ranks: list[int], timeout: float = 2.0) -> str:
        """For the end of an error's message: where ``ranks`` are, and what to read."""
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

    def _left_on(self, rank: int) -> Failure | None:
        """The error on which a rank that has left its loop did so."""
        assert self._store is not None
        try:
            data = self._store.get(self._key(f"bye/{rank}"))
        except RuntimeError:
            return None
        return Failure.from_json(data) if data else None

    def _silent(self, token: str) -> list[int]:
        """Ranks whose thread did not answer the ping and did not say goodbye."""
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

    def _store_lost_error(self) -> DistributedError:
        self.hang.write(f"rank {self.rank} lost its connection to {store_host()}", self.steps_done)
        seen = self.hang.look_at(None, [0]) if rendezvous.is_hosted_by_rank_0() else {}
        return DistributedError(f"{self._store_lost()}{self.hang.hint(seen)}")

    def _store_lost(self) -> str:
        return (
            f"rank {self.rank} lost its connection to {store_host()} ({self._lost}): that process has died or is "
            "stopped, or its machine can't be reached any more"
        )

    # -- stop ------------------------------------------------------------------------------------------------

    def request_stop(self, signum: int) -> None:
        """Ask all ranks to stop together at a step boundary. Safe in a signal handler: appends and sets attributes.

        Each signal is agreed on once in a watch's life. Negative numbers are wishes of the program's own; where both
        have come, the signal counts.
        """
        if signum not in self._wishes:
            self._wishes.append(signum)
        if self._store is None:
            self.stop_requested = True

    @property
    def stop_signal(self) -> int | None:
        """The signal on which all ranks have agreed to stop, perhaps at a boundary still to come."""
        if self._store is None:
            return _first_choice(self._wishes)
        return _first_choice([a.signum for a in self._agreements if a.stop_at is not None])

    def agree_on_stop_step(self, timeout: float = 60.0) -> int | None:
        """The signal to stop on at this :attr:`steps_done`, or None to go on. Waits while an agreement is being made.

        Raises:
            RankFailedError: another rank has failed.
            CollectiveTimeoutError: the agreement is not made within ``timeout`` seconds; names the silent ranks.
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
                    self.stop_requested = False  # a stop that came too late on some rank
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
        """The signal on which the job shall end though training ended first; the same answer on all ranks.

        Every rank calls it once after its last boundary, while signals still call :meth:`request_stop`. A barrier.
        """
        if self._store is None:
            return _first_choice(self._wishes)
        self._post_wishes(self._store)
        # Events are numbered for all ranks alike, and the last rank to arrive says up to which one counts.
        store = self._store
        count = int(self._meet("end of training", timeout, last_word=lambda: str(self._events.count(store))))
        events = [self._events.read(store, index) for index in range(1, count + 1)]
        signum = _first_choice([int(event["signum"]) for event in events if event.get("kind") == "stop"])
        if signum is not None and signum > 0:
            _agree()
        return signum

    def _post_wishes(self, store: Store) -> None:
        """Post what was not posted yet; on return it is, whichever thread did it."""
        with self._posting:
            for signum in list(self._wishes):
                if signum not in self._posted:
                    self._posted.add(signum)
                    self._events.post(store, {"kind": "stop", "signum": signum})

    # -- barrier ---------------------------------------------------------------------------------------------

    def barrier(self, name: str, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Return when all ranks have come to their barrier of this name, each counting its own calls.

        Raises:
            CollectiveTimeoutError: ``missing`` did not come; the message says in which barrier they are instead.
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

    # -- the threads ------------------------------------------------------------------------------------------

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

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            rendezvous.drop_store()
            self._discover()

    def _is_behind(self) -> bool:
        """Whether the thread still has to post something, or is waiting for the store."""
        return bool(self._outbox) or self._looking

    def _guard(self) -> None:
        """Give up on a store whose host is stopped: it keeps the connection and answers nothing, without a time-out.

        Only once the main thread has waited as long as it should: until then the host may come back. Silence is
        counted in this thread's own steps, so that a process that was itself stopped blames nobody.
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
        elif kind == "stop" and all(a.signum != event["signum"] for a in self._agreements):
            agreement = _Agreement(int(event["signum"]))
            with self._lock:
                self._agreements.append(agreement)
                self.stop_requested = True  # first the flag, then the position: see the class's docstring
            if agreement.signum > 0:
                _agree()
            position = self.steps_done
            store.set(self._key(f"stop/{agreement.signum}/{self.rank}"), str(position))
            store.add(self._key(f"stop/{agreement.signum}/count"), 1)

    def _dump_and_answer(self, store: Store, why: str) -> None:
        self._looking = False  # a slow disk is no silent store
        self.hang.write(why, self.steps_done)
        self._looking = True
        self.hang.answer(store)

    def _advance(self, store: Store, agreement: _Agreement) -> None:
        """Finish the agreement if all positions are in, or if a rank has ended its work without posting one."""
        base = self._key(f"stop/{agreement.signum}")
        if store.add(f"{base}/count", 0) >= self.world_size:
            positions = store.multi_get([f"{base}/{rank}" for rank in range(self.world_size)])
            agreement.stop_at = max(int(position) for position in positions) + 1
            return
        now = time.monotonic()
        if now - agreement.looked > 0.5:
            agreement.looked = now
            # A rank posts before it says goodbye or never: all others draw the same conclusion.
            ended = [rank for rank in range(self.world_size) if store.check([self._key(f"bye/{rank}")])]
            if any(not store.check([f"{base}/{rank}"]) for rank in ended):
                agreement.stop_at = -1

    def _pending(self) -> _Agreement | None:
        return next((a for a in self._agreements if a.stop_at is None), None)

    def _without_position(self, agreement: _Agreement) -> list[int]:
        assert self._store is not None
        base = self._key(f"stop/{agreement.signum}")
        return [rank for rank in range(self.world_size) if not self._store.check([f"{base}/{rank}"])]

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            if failure.stop_signal:
                follow(failure.stop_signal)
        self._discover()

    def _discover(self) -> None:
        rendezvous.no_linger()
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
            why = self._store_lost()  # no disk and no other process is asked here: the time is over
        here = f"{failures.STILL_HERE} {passed:.0f} s after {why}, and leaves"
        failures.send_report(Failure(self.rank, here, stack, secondary=cause is not None))
        if not failures.supervised:
            write_stderr(f"torchhal: rank {self.rank} {here}. It was at:\n{stack}")
        leave(1)

    # -- the store -------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
