"""Keep the state of this process's job store: the serving process, pending waits, and the job's failure."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from torchhal.distributed._process_environment import ProcessEnvironment
from torchhal.distributed.failures import Failure
from torchhal.distributed.process import launched_by
from torchhal.distributed.stores import Store

RANK_0 = "rank 0, which hosts the store"

PATIENCE = 30.0
"""Seconds that the store's host waits at exit for ranks to sign off, if no signal has stopped the job."""


@dataclass
class JobStore:
    """The store of a job and the process that serves it."""

    key: tuple[str, int, int, int]
    store: Store
    host: str
    left: bool = False


@dataclass
class RendezvousState:
    """The job's store and the meetings of this process."""

    job: JobStore | None = None
    hosted: dict[tuple[str, int], Store] = field(default_factory=dict)
    lingers: bool = True
    meetings: dict[str, int] = field(default_factory=dict)
    call: int = 0
    """Calls of a Trainer that this process has begun."""
    patience: float = PATIENCE
    """Seconds that the store's host waits at exit for ranks to sign off."""
    absent: int = 0
    """Ranks that never joined, and so won't sign off."""
    ended: list[int] = field(default_factory=list)
    """Ranks whose processes have ended, as this one, which started them, has seen: with or without signing off."""
    expected: ProcessEnvironment | None = None
    """Address where others may wait for this process, which has not joined yet."""
    failure: Failure | None = None
    """Failure of this process, for the ranks that wait for it."""
    pid: int = field(default_factory=os.getpid)


_process = RendezvousState()


def process_state() -> RendezvousState:
    """Return the state of this process; a forked child gets a new one and doesn't use its parent's connections."""
    global _process
    if _process.pid != os.getpid():
        _abandoned.append(_process)
        _process = RendezvousState()
    return _process


_abandoned: list[RendezvousState] = []  # kept, not closed: closing would end threads that exist in the parent only


def under_agent() -> bool:
    """Return whether torchrun's agent serves the job's store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_host() -> str:
    """Return a description of the process that serves the job's store, for messages."""
    job = process_state().job
    return "this process" if job is None else job.host


def is_hosted_by_rank_0() -> bool:
    """Return whether a rank serves the job's store, and not a launcher's process."""
    job = process_state().job
    return job is not None and job.host.startswith(RANK_0)


def host_name() -> str:
    """Return the server where no agent serves: rank 0, unless a process that is not a rank launched all ranks."""
    # the kinds of MultiprocessingLauncher, whose caller is not a rank and serves
    by_caller = launched_by() in ("spawn", "fork", "forkserver")
    return "the launching process" if by_caller else RANK_0


def no_linger() -> None:
    """Record that the job has failed: some ranks will never sign off."""
    process_state().lingers = False


def note_ended(rank: int) -> None:
    """Record that a rank's process has ended, so that it signs off no more; a signal that kills lets it do nothing."""
    process_state().ended.append(rank)


def drop_store() -> None:
    """Record that the job's store no longer responds: nothing may wait for it, not even to sign off."""
    state = process_state()
    state.lingers = False
    if state.job is not None:
        state.job.left = True


def begin_call() -> None:
    """Count the calls of a job, equally on every rank: a stop by a signal applies to one call only."""
    state = process_state()
    state.call += 1
    state.patience = PATIENCE
