"""Announce to ranks that wait for this process that it fails, stops or ends."""

from __future__ import annotations

import atexit
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta

from torchhal.distributed import failures
from torchhal.distributed._process_environment import ProcessEnvironment
from torchhal.distributed._reachability import is_own_address
from torchhal.distributed._rendezvous_state import process_state, under_agent
from torchhal.distributed._roll_call import stopped_key
from torchhal.distributed._store_client import check_job, find_store
from torchhal.distributed._store_server import serve
from torchhal.distributed.failures import Failure
from torchhal.distributed.process import launched_by, settle_threads
from torchhal.distributed.stores import Store, join_address
from torchhal.errors import DistributedError, TorchhalError

ANNOUNCE_TIMEOUT = timedelta(seconds=10)
"""Longest time, in seconds, for which a failed process tries to announce its failure to waiting ranks."""


def expect(environment: ProcessEnvironment) -> None:
    """Record that other ranks may wait for this process at the address of ``environment``.

    If the process ends without having joined, it announces its end to them; under torchrun the agent does.
    """
    if environment.creates_processes_externally and not under_agent():
        process_state().expected = environment
        failures.install_excepthook()
        register_exit()


def note_failure(error: BaseException) -> None:
    """Record the error that is about to end this process, to announce it to waiting ranks.

    Only the first error is kept. Never raises.
    """
    state = process_state()
    state.failure = state.failure or Failure.from_exception(-1, error)


failures.uncaught.append(note_failure)

_exit_registered = False


def register_exit() -> None:
    """Register the announcements to make when the interpreter exits; idempotent."""
    global _exit_registered
    if not _exit_registered:
        _exit_registered = True
        atexit.register(_at_exit, os.getpid())


def _at_exit(pid: int) -> None:
    if pid == os.getpid():
        _say_absent()
        announce_exit()
        serve_until_all_exit(process_state().patience)
        if launched_by() is None:  # a process started by a launcher doesn't finalize
            settle_threads()


def announce_exit() -> None:
    """Announce to waiting ranks that this process ends without joining. Later calls do nothing."""
    job = process_state().job
    if job is None or job.left:
        return
    job.left = True
    try:
        _announce_end(job.store, job.key[3])
    except RuntimeError:  # no store to post to
        pass


def _announce_end(store: Store, rank: int) -> None:
    failure = process_state().failure
    store.set(f"left/{rank}", "" if failure is None else replace(failure, rank=rank).to_json().decode())
    store.add("left", 1)


def _say_absent() -> None:
    """Announce to waiting ranks that this process ends without having joined them. Never raises."""
    state = process_state()
    environment, state.expected = state.expected, None
    if environment is None or state.job is not None:
        return
    failure = state.failure
    deadline = time.monotonic() + (1.0 if failure is None else ANNOUNCE_TIMEOUT.total_seconds())
    try:
        address, port, job = environment.main_address, environment.main_port, environment.job_id()
        world_size, rank = environment.world_size(), _rank_of(environment)
        if world_size == 1 or (failure is None and rank in (0, None)):
            return
        serves = rank == 0
        if serves:
            store = serve(address, port, job)[1]
        else:
            try:
                store = find_store(address, port, rank or 0, deadline)
            except DistributedError:
                if rank is not None or not is_own_address(address):
                    raise
                store, serves = serve(address, port, job)[1], True  # this process may be rank 0 itself
                deadline += ANNOUNCE_TIMEOUT.total_seconds()
            check_job(store, job, rank or 0, join_address(address, port), deadline)
        if rank is not None:
            _announce_end(store, rank)
        elif failure is not None:
            here = f"a process of this job on {socket.gethostname()} (process {os.getpid()}), which knows no rank,"
            store.set("left/unknown", f"{here} {failure.message}")
        if serves:  # until the others have read it
            while store.add("left", 0) < world_size - (rank is None) and time.monotonic() < deadline:
                time.sleep(0.05)
    except Exception:  # no store is served there, or the address can't be resolved
        pass


def _rank_of(environment: ProcessEnvironment) -> int | None:
    """Return this process's rank; None if it has none, which may be the cause of its failure."""
    try:
        return environment.global_rank()
    except TorchhalError:
        return None


def announce_stop(signum: int) -> None:
    """Announce to waiting ranks that this one leaves the call on a signal, so that they leave on it too."""
    state = process_state()
    state.patience = 3.0  # a process that handles a signal must not wait longer for others
    if state.job is None:
        return
    failure = state.failure = Failure.from_signal(state.job.key[3], signum)
    try:
        state.job.store.set(stopped_key(state.call), failure.to_json().decode())
    except RuntimeError:  # no store to post to
        pass


def serve_until_all_exit(timeout: float) -> None:
    """Serve the store until all ranks have signed off: slower ones would lose it otherwise.

    A process that started all others waits for them anyway; after a failure there is no wait.
    """
    state = process_state()
    job = state.job
    if job is None or (job.key[0], job.key[1]) not in state.hosted:
        return
    deadline = time.monotonic() + timeout
    store, world_size = job.store, job.key[2]

    def silent() -> int:
        return state.absent + sum(not store.check([f"left/{rank}"]) for rank in list(state.ended))

    try:
        while state.lingers and store.add("left", 0) < world_size - silent() and time.monotonic() < deadline:
            time.sleep(0.05)
    except RuntimeError:
        pass
