"""Find the store of this process's job at an address, where another program may listen, or none yet."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import Future, wait
from datetime import timedelta

from torchhal.distributed._roll_call import health_checks
from torchhal.distributed.stores import LONG, Store, TCPStore, join_address, pause
from torchhal.errors import DistributedError

JOB = "torchhal/job"
"""Key that holds the identity of the store's job."""

_ANSWER = 30.0
"""Seconds that the serving process has to post the store's job; it does so before anything else."""


def find_store(address: str, port: int, rank: int, deadline: float) -> TCPStore:
    """Connect to the job's store, which may not listen yet."""
    where = join_address(address, port)
    start = time.monotonic()
    problem: OSError | None = None
    # Poll with a plain socket: torch's own retries wait in C++ and print their stack traces.
    while True:
        for check in list(health_checks):
            check()
        left = deadline - time.monotonic()
        if left <= 0:
            raise DistributedError(
                f"rank {rank} found nobody at {where} (MASTER_ADDR, MASTER_PORT) within "
                f"{time.monotonic() - start:.0f} s: {problem or 'no answer'}. Rank 0 serves there once it is started: "
                "is it running, is the address right, and does a firewall let it through?"
            ) from problem
        try:
            socket.create_connection((address, port), timeout=min(left, 2.0)).close()
            break
        except OSError as error:  # refused, unreachable, or a name that can't be resolved yet
            problem = error
            time.sleep(min(0.05, max(left, 0.0)))
    try:
        store = connect_within(max(1.0, deadline - time.monotonic()), address, port)
    except RuntimeError as error:
        raise DistributedError(
            f"rank {rank} reached {where} (MASTER_ADDR, MASTER_PORT), but what answers there is no store of this job: "
            "does another program listen at that port?"
        ) from error
    store.set_timeout(LONG)
    return store


def check_job(store: Store, job: str, rank: int, where: str, deadline: float) -> None:
    """Raise DistributedError unless the store at ``where`` is that of ``job``.

    Writing to another job's store would corrupt that job.
    """
    start = time.monotonic()
    deadline = min(deadline, start + _ANSWER)
    while not store.check([JOB]):
        for check in list(health_checks):
            check()
        if time.monotonic() > deadline:
            raise DistributedError(
                f"rank {rank} reached {where} (MASTER_ADDR, MASTER_PORT), but the store there is none of torchhal's: "
                "another program's processes meet there. Set MASTER_PORT to another port, the same for all ranks"
            )
        time.sleep(pause(time.monotonic() - start))
    theirs = json.loads(store.get(JOB))[0]
    if theirs != job:
        raise DistributedError(
            f"rank {rank} reached {where} (MASTER_ADDR, MASTER_PORT), but another job's ranks meet there: "
            f"{theirs or 'one without a name'}, and this is {job or 'one without a name'}. Set MASTER_PORT to another "
            "port for one of them, the same for all its ranks"
        )


_LATE = 3.0
"""Seconds by which torch's own timeout may be late, as it retries once after a second."""


def connect_within(seconds: float, address: str, port: int) -> TCPStore:
    """Return a client of the store there; raise RuntimeError if it isn't ready in time.

    torch's own timeout covers connecting only: a server that accepts and sends nothing blocks it for ever. So this runs
    in a thread that may be left behind; but not if torch's timeout is about to expire, as a process that exits while
    the thread is inside torch is aborted.
    """
    made: Future[TCPStore] = Future()

    def make() -> None:
        try:
            timeout = timedelta(seconds=seconds)
            made.set_result(TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            made.set_exception(error)

    thread = threading.Thread(target=make, name="torchhal-store", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds + _LATE
    while True:
        for check in list(health_checks):
            check()
        if wait([made], timeout=0.2).done:
            thread.join(_LATE)
            try:
                return made.result()
            finally:
                del made  # the error's traceback has this frame: a cycle would keep the callers' stores from closing
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer within {seconds:.0f} s")
