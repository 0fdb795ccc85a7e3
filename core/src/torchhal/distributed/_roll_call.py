"""Wait until every rank has arrived at one point, through the job's store, and name those that don't."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torchhal.distributed._rank_handshake import Identity
from torchhal.distributed.failures import Failure
from torchhal.distributed.stores import Store, first_line, pause, ranks_text
from torchhal.errors import CollectiveTimeoutError, DistributedError

_GIVEN_UP = "given_up"
"""Key of a meeting under which a rank that won't arrive, or can't wait any longer, posts the reason."""


def stopped_key(call: int) -> str:
    """Return the key of a job under which a rank that leaves its ``call`` on a signal announces it."""
    return f"stopped/{call}"


health_checks: list[Callable[[], None]] = []
"""Called repeatedly while this process waits for others; a launcher's raises when one of its processes has died."""


def wait_for_all_ranks(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *,
    name: str,
    job: Store | None = None,
    call: int = 0,
    node_of: Callable[[int], int | str | None] = lambda rank: None,
    host: str = "the store of the job",
) -> None:
    """Return when every rank has called this on ``store``.

    Args:
        store: the store of this meeting alone.
        rank: this process's rank.
        world_size: number of ranks.
        timeout: the longest wait.
        name: of the meeting, for messages.
        job: the store of the job, where ranks that end announce it.
        call: number of the job's call, see ``rendezvous.begin_call``: a stop of another call is ignored.
        node_of: returns the node of a rank, for messages.
        host: the process that serves the store, for messages.

    Raises:
        CollectiveTimeoutError: some did not arrive within ``timeout``, or have ended.
        RankFailedError: one has given up, or has ended with an error or on a signal, its ``stop_signal``.
        DistributedError: two processes have one rank, or they belong to jobs of different sizes.
    """
    try:
        _check_given_up(store)
        identity = Identity(store, rank, world_size)
        identity.announce()
        store.add("here", 1)

        def all_here() -> bool:
            if store.add("here", 0) < world_size:
                return False
            identity.check()
            return True

        def absent() -> list[int]:
            return [other for other in range(world_size) if not store.check([f"here/{other}"])]

        def gone() -> list[int]:
            identity.check()
            _check_given_up(store)
            if job is None:
                return []
            if job.check([stopped_key(call)]):
                raise Failure.from_json(job.get(stopped_key(call))).error()
            left = [other for other in absent() if job.check([f"left/{other}"])]
            for other in left:
                if data := job.get(f"left/{other}"):
                    raise Failure.from_json(data).error()
            if not left and absent() and job.check(["left/unknown"]):
                raise DistributedError(f"{name}: {job.get('left/unknown').decode()}")
            return left

        wait_until(all_here, timeout, name=name, absent=absent, gone=gone, node_of=node_of)
    except RuntimeError as error:
        raise as_distributed_error(error, name, host) from error


def give_up(store: Store, failure: Failure) -> None:
    """Announce to ranks in this meeting, and to later ones, that it is cancelled. Never raises."""
    try:
        store.compare_set(_GIVEN_UP, "", failure.to_json().decode())
    except RuntimeError:  # no store to post to
        pass


def _check_given_up(store: Store) -> None:
    if store.check([_GIVEN_UP]):
        raise Failure.from_json(store.get(_GIVEN_UP)).error()


def wait_until(
    done: Callable[[], bool],
    timeout: timedelta,
    *,
    name: str,
    absent: Callable[[], list[int]],
    gone: Callable[[], list[int]] | None = None,
    node_of: Callable[[int], int | str | None] = lambda rank: None,
) -> None:
    start = time.monotonic()
    look = start + 1.0
    while not done():
        for check in list(health_checks):
            check()
        now = time.monotonic()
        if now - start > timeout.total_seconds():
            missing = absent()
            if not missing and done():  # the last has just arrived
                return
            who = ranks_text(missing) + _nodes_text(missing, node_of) if missing else "a rank"
            raise CollectiveTimeoutError(
                f"{name}: {who} did not come within {timeout.total_seconds():g} s. Does every process "
                "reach this point, and can it reach the address?",
                name=name,
                missing=missing,
            )
        if gone is not None and now > look:
            look = now + 1.0
            if left := gone():
                raise CollectiveTimeoutError(
                    f"{name}: {ranks_text(left)} ended without coming here. Every process must run the same script to "
                    "the same point.",
                    name=name,
                    missing=left,
                )
        time.sleep(pause(now - start))


def _nodes_text(ranks: list[int], node_of: Callable[[int], int | str | None]) -> str:
    nodes = dict.fromkeys(node for rank in ranks if (node := node_of(rank)) is not None)
    return f" (node {', '.join(map(str, nodes))})" if nodes else ""


def as_distributed_error(error: RuntimeError, name: str, host: str) -> DistributedError:
    if isinstance(error, DistributedError):
        return error
    return DistributedError(f"{name}: lost {host}, which is gone or unreachable ({first_line(error)})")
