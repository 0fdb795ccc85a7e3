"""Where the processes of a job meet: one TCPStore per job, found once per process."""

from __future__ import annotations

import atexit
import errno
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import timedelta

from torchhal.distributed import failures
from torchhal.distributed._process_environment import ProcessEnvironment
from torchhal.distributed._reachability import check_leads_here, is_own_address
from torchhal.distributed._roll_call import (
    as_distributed_error,
    give_up,
    health_checks,
    stopped_key,
    wait_for_all_ranks,
    wait_until,
)
from torchhal.distributed._store_client import JOB, check_job, connect_within, find_store
from torchhal.distributed.failures import Failure
from torchhal.distributed.process import launched_by, settle_threads
from torchhal.distributed.stores import LONG, HashStore, PrefixedStore, Store, TCPStore, join_address
from torchhal.errors import CollectiveTimeoutError, DistributedError, LaunchError, TorchhalError

__all__ = [
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
"""What every wait for other ranks takes at most, where the strategy says nothing else."""

_TELL = timedelta(seconds=10)
"""What a process that has failed takes at most to tell those that wait for it."""

HOSTS = "hosts-"
"""Kind of the meetings in which ranks find out who shares a host."""

_RANK_0 = "rank 0, which hosts the store"

_PATIENCE = 30.0


@dataclass
class _Job:
    key: tuple[str, int, int, int]
    store: Store
    host: str
    left: bool = False


@dataclass
class _State:
    job: _Job | None = None
    hosted: dict[tuple[str, int], Store] = field(default_factory=dict)
    lingers: bool = True
    meetings: dict[str, int] = field(default_factory=dict)
    call: int = 0
    """Calls of a Trainer that this process has begun."""
    patience: float = _PATIENCE
    """Seconds that the host of the store waits at its end for goodbyes."""
    absent: int = 0
    """Ranks that never came, and so won't say goodbye."""
    expected: ProcessEnvironment | None = None
    """Where others may wait for this process, which has not come yet."""
    failure: Failure | None = None
    """What this process failed of, for those that wait for it."""
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


def start_store(address: str, port: int = 0, job: str = "") -> int:
    """Serve the job's store in this process, before any other process of the job is started; the port.

    Port 0 takes a free one, without the race of choosing first and binding later. On a loopback address the server
    listens there only: the store believes whoever connects.

    Args:
        job: tells this job from others, see :meth:`ClusterEnvironment.job_id`.

    Raises:
        LaunchError: the port is taken, or ``address`` leads to another host.
    """
    bound, store, mark = _serve(address, port, job)
    if not _is_loopback(address):

        def serves_here(seconds: float) -> bool:
            try:
                return bool(json.loads(connect_within(seconds, address, bound).get(JOB))[1] == mark)
            except (OSError, RuntimeError, ValueError):
                return False

        check_leads_here(address, bound, serves_here)
    _state().hosted[address, bound] = store
    return bound


def _is_loopback(address: str) -> bool:
    return address in ("127.0.0.1", "::1", "localhost")


def _serve(address: str, port: int, job: str) -> tuple[int, Store, str]:
    """Port, store, and what tells this store from every other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    loopback = _is_loopback(address)
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
            f"({join_address(address, port)}): set MASTER_PORT to a free port, the same on every node; each job needs "
            "one of its own"
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
    mark = uuid.uuid4().hex
    store.set(JOB, json.dumps([job, mark]))
    return bound, store, mark


def stop_store(address: str, port: int, *, ranks: int = 0, timeout: float = 0.0) -> None:
    """Stop serving, when ``ranks`` have said goodbye or after ``timeout`` seconds: the job of that store is over."""
    store = _state().hosted.pop((address, port), None)
    deadline = time.monotonic() + timeout
    while store is not None and store.add("left", 0) < ranks and time.monotonic() < deadline:
        time.sleep(0.02)


def connect(environment: ProcessEnvironment, timeout: timedelta = DEFAULT_TIMEOUT) -> Store:
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
    agent = _under_agent()
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
        who = f"torchrun's agent at {where}" if agent else f"{_host_name()} at {where}"
    if agent:
        store = _attempt_store(store, rank, world_size, timeout, where)
    _register_exit()
    state.job = _Job(key, store, who)
    return store


def expect(environment: ProcessEnvironment) -> None:
    """Note that others may wait for this process at the address of ``environment``: if it ends without having come
    there, it tells them. Under torchrun the agent does."""
    if environment.creates_processes_externally and not _under_agent():
        _state().expected = environment
        failures.install_excepthook()
        _register_exit()


def note_failure(error: BaseException) -> None:
    """Note what this process is about to end of: ranks that wait for it are told. The first counts. Never raises."""
    state = _state()
    state.failure = state.failure or Failure.from_exception(-1, error)


failures.uncaught.append(note_failure)

_exit_registered = False


def _register_exit() -> None:
    global _exit_registered
    if not _exit_registered:
        _exit_registered = True
        atexit.register(_at_exit, os.getpid())


def _at_exit(pid: int) -> None:
    if pid == os.getpid():
        _say_absent()
        announce_exit()
        serve_until_all_exit(_state().patience)
        if launched_by() is None:  # a process that a launcher owns doesn't finalize
            settle_threads()


def no_linger() -> None:
    """The job has failed: some ranks will never say goodbye."""
    _state().lingers = False


def begin_call() -> None:
    """Count the calls of a job, on every rank alike: one that a signal has stopped is over when the next one begins."""
    state = _state()
    state.call += 1
    state.patience = _PATIENCE


def next_generation(kind: str = "") -> int:
    """Count this process's meetings: once for each, on every rank alike, before anything of it can fail.

    A group that uses ``PrefixStore(f"torchhal/{n}", store)`` never reads what an earlier one left. A meeting that one
    rank gives up fails on all, whenever they come to it, so they are at the same number afterwards.
    """
    meetings = _state().meetings
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
    """A fresh store for the next process group, after all ranks have asked for theirs.

    So a second Trainer in one script can set up again, and a rank that never comes is named here and not hidden in a
    backend's time-out.

    Args:
        number: of the meeting, as :func:`next_generation` gave it; None: the next one.
        kind: meetings of different kinds are counted apart.
        name: of the meeting, for messages.
        say: what the others may read under ``say/RANK``.

    Raises:
        CollectiveTimeoutError: ``missing`` never came within ``timeout``.
        RankFailedError: another rank has given this meeting up.
        what :func:`connect` raises.
    """
    number = next_generation(kind) if number is None else number
    store = connect(environment, timeout)
    rank, world_size = environment.global_rank(), environment.world_size()
    if world_size == 1:
        return store
    fresh = PrefixedStore(f"torchhal/{kind}{number}", store)
    where = join_address(environment.main_address, environment.main_port)
    name = name.format(number=number, where=where)
    state = _state()
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
    state.failure = None  # what an earlier set-up failed of, this process has outlived
    return fresh


def withdraw(environment: ProcessEnvironment, number: int, error: BaseException) -> None:
    """Tell ranks that come to meeting ``number`` that this one won't: its own set-up has failed. Never raises."""
    note_failure(error)
    if isinstance(error, (DistributedError, LaunchError)):
        return  # it came there, and has told the others, or can't reach them
    ends = not isinstance(error, Exception)  # of a signal, of which torchrun's agent hears or has heard
    if ends and _under_agent() and _state().job is None:
        return
    try:
        if environment.world_size() > 1:
            store, rank = connect(environment, _TELL), environment.global_rank()
            give_up(PrefixedStore(f"torchhal/{number}", store), Failure.from_exception(rank, error))
    except Exception:  # whoever waits hears of it when this process ends
        pass


def _under_agent() -> bool:
    """Whether torchrun's agent serves the job's store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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


def drop_store() -> None:
    """The job's store answers no more: nobody may wait for it, not even to say goodbye."""
    state = _state()
    state.lingers = False
    if state.job is not None:
        state.job.left = True


def announce_exit() -> None:
    """Tell ranks that wait for this one that it won't come: its process ends. Once; later calls do nothing."""
    job = _state().job
    if job is None or job.left:
        return
    job.left = True
    try:
        _tell_end(job.store, job.key[3])
    except RuntimeError:  # nobody there to tell
        pass


def _tell_end(store: Store, rank: int) -> None:
    failure = _state().failure
    store.set(f"left/{rank}", "" if failure is None else replace(failure, rank=rank).to_json().decode())
    store.add("left", 1)


def _say_absent() -> None:
    """Tell those that wait for this process that it ends without having come to where they meet. Never raises."""
    state = _state()
    environment, state.expected = state.expected, None
    if environment is None or state.job is not None:
        return
    failure = state.failure
    deadline = time.monotonic() + (1.0 if failure is None else _TELL.total_seconds())
    try:
        address, port, job = environment.main_address, environment.main_port, environment.job_id()
        world_size, rank = environment.world_size(), _rank_of(environment)
        if world_size == 1 or (failure is None and rank in (0, None)):
            return
        serves = rank == 0
        if serves:
            store = _serve(address, port, job)[1]
        else:
            try:
                store = find_store(address, port, rank or 0, deadline)
            except DistributedError:
                if rank is not None or not is_own_address(address):
                    raise
                store, serves = _serve(address, port, job)[1], True  # this process may be rank 0 itself
                deadline += _TELL.total_seconds()
            check_job(store, job, rank or 0, join_address(address, port), deadline)
        if rank is not None:
            _tell_end(store, rank)
        elif failure is not None:
            here = f"a process of this job on {socket.gethostname()} (process {os.getpid()}), which knows no rank,"
            store.set("left/unknown", f"{here} {failure.message}")
        if serves:  # until the others know
            while store.add("left", 0) < world_size - (rank is None) and time.monotonic() < deadline:
                time.sleep(0.05)
    except Exception:  # nobody serves there, or nobody knows where that is
        pass


def _rank_of(environment: ProcessEnvironment) -> int | None:
    """This process's rank; None where it has none, which may be what it failed of."""
    try:
        return environment.global_rank()
    except TorchhalError:
        return None


def announce_stop(signum: int) -> None:
    """Tell ranks that wait to meet this one that it leaves this call on a signal: they leave on it, too."""
    state = _state()
    state.patience = 3.0  # who has a signal to answer waits no longer for anybody
    if state.job is None:
        return
    failure = state.failure = Failure.from_signal(state.job.key[3], signum)
    try:
        state.job.store.set(stopped_key(state.call), failure.to_json().decode())
    except RuntimeError:  # nobody there to tell
        pass


def serve_until_all_exit(timeout: float) -> None:
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
