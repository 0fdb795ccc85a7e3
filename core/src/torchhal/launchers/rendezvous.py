"""Where the processes of a job meet: one TCPStore per job, found once per process."""

from __future__ import annotations

import atexit
import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta

from torchhal.cluster.base import ClusterEnvironment
from torchhal.errors import CollectiveTimeoutError, DistributedError, LaunchError
from torchhal.launchers.identity import Identity
from torchhal.launchers.process import launched_by, settle_threads
from torchhal.launchers.stores import (
    LONG,
    HashStore,
    PrefixedStore,
    Store,
    TCPStore,
    first_line,
    join_address,
    pause,
    ranks_text,
)

DEFAULT_TIMEOUT = timedelta(minutes=5)

_RANK_0 = "rank 0, which hosts the store"

health_checks: list[Callable[[], None]] = []
"""Called again and again while this process waits for others; a launcher's raises when a process it started died."""


@dataclass
class _Job:
    key: tuple[str, int, int, int]
    store: Store
    host: str
    generation: int = 0
    left: bool = False


@dataclass
class _State:
    job: _Job | None = None
    hosted: dict[tuple[str, int], Store] = field(default_factory=dict)
    lingers: bool = True
    absent: int = 0
    """Ranks that never came, and so won't say goodbye."""
    pid: int = field(default_factory=os.getpid)


_process = _State()


def _state() -> _State:
    """This process's state: a forked child must not speak on its parent's connections."""
    global _process
    if _process.pid != os.getpid():
        _abandoned.append(_process)
        _process = _State()
    return _process


_abandoned: list[_State] = []  # kept, not closed: closing would end threads that exist in the parent only


def host(address: str, port: int = 0) -> int:
    """Serve the job's store in this process, before any other process of the job is started; the port.

    Port 0 takes a free one, without the race of choosing first and binding later. On a loopback address the server
    listens there only: the store believes whoever connects.

    Raises:
        LaunchError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    loopback = address in ("127.0.0.1", "::1", "localhost")
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((("127.0.0.1" if family == socket.AF_INET else "::1") if loopback else "", port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        what = "is already in use" if error.errno == errno.EADDRINUSE else f"can't be served ({error.strerror})"
        raise LaunchError(
            f"port {port} {what} on this machine, where the processes of the job should meet "
            f"({join_address(address, port)}): set MASTER_PORT to a free port, the same on every node"
        ) from error
    bound: int = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1" if family == socket.AF_INET else "::1",
        bound,
        None,
        True,
        timeout=LONG,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    _state().hosted[address, bound] = store
    return bound


def unhost(address: str, port: int, *, ranks: int = 0, timeout: float = 0.0) -> None:
    """Stop serving, when ``ranks`` have said goodbye or after ``timeout`` seconds: the job of that store is over."""
    store = _state().hosted.pop((address, port), None)
    deadline = time.monotonic() + timeout
    while store is not None and store.add("left", 0) < ranks and time.monotonic() < deadline:
        time.sleep(0.02)


def connect(environment: ClusterEnvironment, timeout: timedelta = DEFAULT_TIMEOUT) -> Store:
    """The store of this process's job, connected on the first call. A job of one needs no port and gets its own.

    Under torchrun it is the agent's store, under a prefix that no earlier attempt of the job used. Otherwise rank 0,
    or the process that launched it, serves.

    Raises:
        DistributedError: nobody answers at the main address within ``timeout``, or something that is no store.
        CollectiveTimeoutError: (torchrun) ranks never came; names them.
        LaunchError: rank 0 can't serve at the port.
    """
    world_size, rank = environment.world_size(), environment.global_rank()
    if world_size == 1:
        return HashStore()
    address, port = environment.main_address, environment.main_port
    state = _state()
    key = (address, port, world_size, rank)
    if state.job is not None and state.job.key == key:
        return state.job.store
    where = join_address(address, port)
    deadline = time.monotonic() + timeout.total_seconds()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: Store
    if (address, port) in state.hosted:
        store, who = state.hosted[address, port], f"this process at {where}"
    elif rank == 0 and not agent and launched_by() is None:
        host(address, port)
        store, who = state.hosted[address, port], f"this process at {where}"
    else:
        store = _client(address, port, rank, deadline)
        who = f"torchrun's agent at {where}" if agent else f"{_host_name()} at {where}"
    if agent:
        store = _attempt_store(store, rank, world_size, timeout, where)
    if state.job is None:
        atexit.register(_at_exit, os.getpid())
    state.job = _Job(key, store, who)
    return store


def _at_exit(pid: int) -> None:
    if pid == os.getpid():
        say_goodbye()
        linger(30.0)
        if launched_by() is None:  # a process that a launcher owns doesn't finalize
            settle_threads()


def no_linger() -> None:
    """The job has failed: some ranks will never say goodbye."""
    _state().lingers = False


def next_generation() -> int:
    """Count this process's process groups: call it once before each ``init_process_group``, on every rank alike.

    A group that uses ``PrefixStore(f"torchhal/{n}", store)`` never reads what an earlier one left.
    """
    job = _state().job
    if job is None:
        return 1
    job.generation += 1
    return job.generation


def generation_store(environment: ClusterEnvironment, timeout: timedelta = DEFAULT_TIMEOUT) -> Store:
    """A fresh store for the next process group, after all ranks have asked for theirs.

    So a second Trainer in one script can set up again, and a rank that never comes is named here and not hidden in a
    backend's time-out.

    Raises:
        CollectiveTimeoutError: ``missing`` never came within ``timeout``.
        what :func:`connect` raises.
    """
    store = connect(environment, timeout)
    world_size = environment.world_size()
    if world_size == 1:
        return store
    number = next_generation()
    fresh = PrefixedStore(f"torchhal/{number}", store)
    where = join_address(environment.main_address, environment.main_port)
    name = f"set-up of process group {number} at {where}"
    roll_call(fresh, environment.global_rank(), world_size, timeout, name=name, job=store, node_of=environment.node_of)
    return fresh


def store_host() -> str:
    """Who serves the job's store, for messages."""
    job = _state().job
    return "this process" if job is None else job.host


def is_hosted_by_rank_0() -> bool:
    """Whether it is a rank that serves the job's store, and no launcher's process."""
    job = _state().job
    return job is not None and job.host.startswith(_RANK_0)


def _host_name() -> str:
    """Who serves, where it is no agent: rank 0, unless a process that is no rank launched them all."""
    # the kinds of MultiprocessingLauncher, whose caller is no rank and serves
    by_caller = launched_by() in ("spawn", "fork", "forkserver")
    return "the launching process" if by_caller else _RANK_0


def abandon() -> None:
    """The job's store answers no more: nobody may wait for it, not even to say goodbye."""
    state = _state()
    state.lingers = False
    if state.job is not None:
        state.job.left = True


def say_goodbye() -> None:
    """Tell ranks that wait for this one that it won't come: its process ends. Once; later calls do nothing."""
    job = _state().job
    if job is None or job.left:
        return
    job.left = True
    try:
        job.store.set(f"left/{job.key[3]}", "1")
        job.store.add("left", 1)
    except RuntimeError:  # nobody there to tell
        pass


def linger(timeout: float) -> None:
    """Serve on until all ranks have said goodbye: slower ones would lose the store under their feet.

    A process that started all others waits for them anyway, and nobody waits after a failure.
    """
    state = _state()
    job = state.job
    if job is None or (job.key[0], job.key[1]) not in state.hosted:
        return
    deadline = time.monotonic() + timeout
    try:
        while state.lingers and job.store.add("left", 0) < job.key[2] - state.absent and time.monotonic() < deadline:
            time.sleep(0.05)
    except RuntimeError:
        pass


def roll_call(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *,
    name: str,
    job: Store | None = None,
    node_of: Callable[[int], int | str | None] = lambda rank: None,
) -> None:
    """Return when every rank has called this on ``store``.

    Raises:
        CollectiveTimeoutError: some never came within ``timeout``, or have ended.
        DistributedError: two processes have one rank, or they mean jobs of different sizes.
    """
    _state().absent = 0
    try:
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
            return [] if job is None else [other for other in absent() if job.check([f"left/{other}"])]

        _until(all_here, timeout, name=name, absent=absent, gone=gone, node_of=node_of)
    except RuntimeError as error:
        raise _as_distributed_error(error, name) from error


def _until(
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
            _state().absent = len(missing)
            who = ranks_text(missing) + _nodes_text(missing, node_of)
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


def _client(address: str, port: int, rank: int, deadline: float) -> TCPStore:
    """Connect to the job's store, which may not listen yet."""
    where = join_address(address, port)
    start = time.monotonic()
    problem: OSError | None = None
    # A plain socket finds out when somebody listens: torch's own retries wait in C++ and print their stack traces.
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
        except OSError as error:  # refused, unreachable, or a name that appears late
            problem = error
            time.sleep(min(0.05, max(left, 0.0)))
    try:
        store = _within(max(1.0, deadline - time.monotonic()), address, port)
    except RuntimeError as error:
        raise DistributedError(
            f"rank {rank} reached {where} (MASTER_ADDR, MASTER_PORT), but what answers there is no store of this job: "
            "does another program listen at that port?"
        ) from error
    store.set_timeout(LONG)
    return store


def _within(seconds: float, address: str, port: int) -> TCPStore:
    """A client of the store there; RuntimeError if it isn't ready in time.

    torch's own timeout ends with the connection: whoever accepts it and says nothing is waited for without end. So
    this is done in a thread, which may be left behind.
    """
    made: Future[TCPStore] = Future()

    def make() -> None:
        try:
            timeout = timedelta(seconds=seconds)
            made.set_result(TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=make, name="torchhal-store", daemon=True).start()
    deadline = time.monotonic() + seconds
    while True:
        for check in list(health_checks):
            check()
        if wait([made], timeout=0.2).done:
            return made.result()
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer within {seconds:.0f} s")


def _attempt_store(store: Store, rank: int, world_size: int, timeout: timedelta, where: str) -> Store:
    """The agent's store under a prefix of this attempt.

    torchrun's attempts share one store, so a restarted worker would read addresses that dead ones left. No variable
    numbers the attempts alike on all nodes (TORCHELASTIC_RESTART_COUNT is each agent's own), so rank 0 draws a name
    and answers everybody who asks, until all have acknowledged. An answer goes to one question's own key: what an
    earlier attempt left is never taken for it.
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

            _until(serve, timeout, name=name, absent=lambda: sorted(waiting))
        else:
            question = uuid.uuid4().hex
            base.set(f"ask/{rank}", question)
            answer = f"answer/{question}"
            _until(lambda: base.check([answer]), timeout, name=name, absent=lambda: [0])
            nonce = base.get(answer).decode()
            base.set(f"ack/{nonce}/{rank}", "1")
    except RuntimeError as error:
        raise _as_distributed_error(error, name) from error
    return PrefixedStore(f"torchhal/attempt/{nonce}", store)


def _as_distributed_error(error: RuntimeError, name: str) -> DistributedError:
    if isinstance(error, DistributedError):
        return error
    return DistributedError(f"{name}: lost {store_host()}, which is gone or unreachable ({first_line(error)})")
