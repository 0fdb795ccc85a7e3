"""Keep what this process knows of its job's store: who serves it, who waits, and whether the job has failed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from torchhal.distributed._process_environment import ProcessEnvironment
from torchhal.distributed.failures import Failure
from torchhal.distributed.process import launched_by
from torchhal.distributed.stores import Store

RANK_0 = "rank 0, which hosts the store"

PATIENCE = 30.0
"""Seconds that the host of the store waits at its end for goodbyes, where no signal has stopped the job."""


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
    """Seconds that the host of the store waits at its end for goodbyes."""
    absent: int = 0
    """Ranks that never came, and so won't say goodbye."""
    expected: ProcessEnvironment | None = None
    """Address where others may wait for this process, which has not come yet."""
    failure: Failure | None = None
    """Failure of this process, for those that wait for it."""
    pid: int = field(default_factory=os.getpid)


_process = RendezvousState()


def process_state() -> RendezvousState:
    """Return the state of this process; a forked child gets its own and sends nothing on its parent's connections."""
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
    """Return who serves the job's store, for messages."""
    job = process_state().job
    return "this process" if job is None else job.host


def is_hosted_by_rank_0() -> bool:
    """Return whether it is a rank that serves the job's store, and no launcher's process."""
    job = process_state().job
    return job is not None and job.host.startswith(RANK_0)


def host_name() -> str:
    """Return who serves, where it is no agent: rank 0, unless a process that is no rank launched them all."""
    # the kinds of MultiprocessingLauncher, whose caller is no rank and serves
    by_caller = launched_by() in ("spawn", "fork", "forkserver")
    return "the launching process" if by_caller else RANK_0


def no_linger() -> None:
    """Record that the job has failed: some ranks will never say goodbye."""
    process_state().lingers = False


def drop_store() -> None:
    """Record that the job's store no longer answers: nothing may wait for it, not even to say goodbye."""
    state = process_state()
    state.lingers = False
    if state.job is not None:
        state.job.left = True


def begin_call() -> None:
    """Count the calls of a job, on every rank alike: one that a signal has stopped is over when the next one begins."""
    state = process_state()
    state.call += 1
    state.patience = PATIENCE
