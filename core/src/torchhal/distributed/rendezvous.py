"""Connect the processes of a job to one store per job, found once per process."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torchhal.distributed._exit_announcements import (
    ANNOUNCE_TIMEOUT,
    announce_exit,
    expect,
    note_failure,
    register_exit,
)
from torchhal.distributed._exit_announcements import announce_stop as announce_stop
from torchhal.distributed._process_environment import ProcessEnvironment
from torchhal.distributed._rendezvous_state import JobStore, host_name, process_state, store_host, under_agent
from torchhal.distributed._rendezvous_state import begin_call as begin_call
from torchhal.distributed._roll_call import (
    as_distributed_error,
    give_up,
    health_checks,
    wait_for_all_ranks,
    wait_until,
)
from torchhal.distributed._store_client import check_job, find_store
from torchhal.distributed._store_server import start_store, stop_store
from torchhal.distributed.failures import Failure
from torchhal.distributed.process import launched_by
from torchhal.distributed.stores import HashStore, PrefixedStore, Store, join_address
from torchhal.errors import CollectiveTimeoutError, DistributedError, LaunchError

__all__ = [
    "announce_exit",
    "connect",
    "expect",
    "generation_store",
    "health_checks",
    "start_store",
    "stop_store",
    "wait_for_all_ranks",
    "withdraw",
]

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""The longest wait for other ranks, where the strategy sets no other."""

HOSTS = "hosts-"
"""Kind of the meetings in which ranks determine which of them share a host."""


def connect(environment: ProcessEnvironment, timeout: timedelta = DEFAULT_TIMEOUT) -> Store:
    """Return the store of this process's job, connected on the first call. A job of one needs no port and gets its own.

    Under torchrun it is the agent's store, under a prefix that no earlier attempt of the job used. Otherwise rank 0,
    or the process that launched it, serves.

    Raises:
        DistributedError: nothing responds at the main address within ``timeout``, or something that is not a store.
        CollectiveTimeoutError: (torchrun) ranks did not arrive; names them.
        LaunchError: rank 0 can't serve at the port.
    """
    world_size, rank = environment.world_size(), environment.global_rank()
    if world_size == 1:
        return HashStore()
    address, port = environment.main_address, environment.main_port
    state = process_state()
    key = (address, port, world_size, rank)
    if state.job is not None and state.job.key == key:
        return state.job.store
    where = join_address(address, port)
    deadline = time.monotonic() + timeout.total_seconds()
    agent = under_agent()
    store: Store
    if (address, port) in state.hosted:
        store, who = state.hosted[address, port], f"this process at {where}"
    elif rank == 0 and not agent and launched_by() is None:
        start_store(address, port, environment.job_id())
        store, who = state.hosted[address, port], f"this process at {where}"
    else:
        store = find_store(address, port, rank, deadline)
        if not agent:
            check_job(store, environment.job_id(), rank, where, deadline)
        who = f"torchrun's agent at {where}" if agent else f"{host_name()} at {where}"
    if agent:
        store = _attempt_store(store, rank, world_size, timeout, where)
    register_exit()
    state.job = JobStore(key, store, who)
    return store


def next_generation(kind: str = "") -> int:
    """Count this process's meetings: once for each, equally on every rank, before any part of it can fail.

    A group that uses ``PrefixStore(f"torchhal/{n}", store)`` never reads keys of an earlier one. A meeting that one
    rank cancels fails on all ranks, whenever they enter it, so they are at the same number afterwards.
    """
    meetings = process_state().meetings
    meetings[kind] = meetings.get(kind, 0) + 1
    return meetings[kind]


def generation_store(
    environment: ProcessEnvironment,
    timeout: timedelta = DEFAULT_TIMEOUT,
    number: int | None = None,
    *,
    kind: str = "",
    name: str = "set-up of process group {number} at {where}",
    say: str = "",
) -> Store:
    """Return a fresh store for the next process group, after all ranks have requested theirs.

    So a second Trainer in one script can set up again, and a missing rank is named here instead of causing a backend's
    time-out.

    Args:
        environment: the ranks and the address where they meet.
        timeout: the longest wait for the other ranks.
        number: of the meeting, as :func:`next_generation` returned it; None: the next one.
        kind: meetings of different kinds are counted apart.
        name: of the meeting, for messages.
        say: a value for the others to read under ``say/RANK``.

    Raises:
        CollectiveTimeoutError: ``missing`` did not arrive within ``timeout``.
        RankFailedError: another rank has cancelled this meeting.
        DistributedError: nothing responds at the main address within ``timeout``, or something that is not a store.
        LaunchError: rank 0 can't serve at the port.
    """
    number = next_generation(kind) if number is None else number
    store = connect(environment, timeout)
    rank, world_size = environment.global_rank(), environment.world_size()
    if world_size == 1:
        return store
    fresh = PrefixedStore(f"torchhal/{kind}{number}", store)
    where = join_address(environment.main_address, environment.main_port)
    name = name.format(number=number, where=where)
    state = process_state()
    state.absent = 0
    try:
        fresh.set(f"say/{rank}", say)
        wait_for_all_ranks(
            fresh,
            rank,
            world_size,
            timeout,
            name=name,
            job=store,
            call=state.call,
            node_of=environment.node_of,
            host=store_host(),
        )
    except BaseException as error:
        if isinstance(error, CollectiveTimeoutError):
            state.absent = len(error.missing)
        give_up(fresh, Failure.from_exception(rank, error))
        raise
    state.failure = None  # an earlier set-up's failure did not end this process
    state.lingers = True  # nor any other rank: all have come, and will sign off
    return fresh


def withdraw(environment: ProcessEnvironment, number: int, error: BaseException) -> None:
    """Announce to ranks in meeting ``number`` that this one won't arrive: its own set-up has failed.

    Never raises.
    """
    note_failure(error)
    if isinstance(error, (DistributedError, LaunchError)):
        return  # it arrived, and has notified the others, or can't reach them
    ends = not isinstance(error, Exception)  # on a signal, which torchrun's agent receives too
    if ends and under_agent() and process_state().job is None:
        return
    try:
        if environment.world_size() > 1:
            store, rank = connect(environment, ANNOUNCE_TIMEOUT), environment.global_rank()
            give_up(PrefixedStore(f"torchhal/{number}", store), Failure.from_exception(rank, error))
    except Exception:  # waiting ranks are notified when this process ends
        pass


def _attempt_store(store: Store, rank: int, world_size: int, timeout: timedelta, where: str) -> Store:
    """Return the agent's store under a prefix of this attempt.

    torchrun's attempts share one store, so a restarted worker would read addresses of ended ones. No variable
    numbers the attempts alike on all nodes (TORCHELASTIC_RESTART_COUNT is each agent's own), so rank 0 draws a name
    and answers every request, until all have acknowledged. An answer goes to a key unique to the request: values of
    an earlier attempt are never taken for it.
    """
    name = f"meeting of torchrun's workers at {where}"
    base = PrefixedStore("torchhal", store)
    try:
        if rank == 0:
            nonce = uuid.uuid4().hex
            waiting = set(range(1, world_size))

            def serve() -> bool:
                for other in sorted(waiting):
                    if base.check([f"ack/{nonce}/{other}"]):
                        waiting.discard(other)
                    elif base.check([f"ask/{other}"]):
                        base.set(f"answer/{base.get(f'ask/{other}').decode()}", nonce)
                return not waiting

            wait_until(serve, timeout, name=name, absent=lambda: sorted(waiting))
        else:
            question = uuid.uuid4().hex
            base.set(f"ask/{rank}", question)
            answer = f"answer/{question}"
            wait_until(lambda: base.check([answer]), timeout, name=name, absent=lambda: [0])
            nonce = base.get(answer).decode()
            base.set(f"ack/{nonce}/{rank}", "1")
    except RuntimeError as error:
        raise as_distributed_error(error, name, f"torchrun's agent at {where}") from error
    return PrefixedStore(f"torchhal/attempt/{nonce}", store)
