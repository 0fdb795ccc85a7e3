"""The scheduler's job that this process belongs to: the signals that announce its end, and how it is requeued.

The job is the same for every launcher of the ranks: srun, torchhal itself, torchrun, mpirun.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time

from torchhal.cluster._env_vars import given
from torchhal.distributed.process import describe_exit
from torchhal.distributed.signals import SignalRecorder
from torchhal.errors import ConfigurationError

_SWITCH = "TORCHHAL_REQUEUE"

_END_TIMEOUT = 60.0
"""Seconds to wait for the SIGTERM of a job that was put back: Slurm sends it within one."""

_ASK = 'trap "" HUP INT TERM USR1 USR2; exec scontrol requeue "$1"'
"""Slurm ends scontrol, a process of the job, like the others, and often before scontrol has reported its result."""


class Job:
    """A job of no supported scheduler: only SIGTERM and SIGINT announce its end."""

    stop_signals: tuple[int, ...] = ()
    """Signals, beside SIGTERM and SIGINT, by which the scheduler announces the end: a fit that gets one saves and ends
    with 128 and its number."""

    def check(self) -> str:
        """Raise ConfigurationError for a switch that has no effect; return a note for the user, or ""."""
        if not _switch():
            return ""
        return (
            f"{_SWITCH}=1 asks for a requeue, but this process belongs to no job of Slurm's (SLURM_JOB_ID is not set)"
        )

    def run_again(self, signum: int, *, continues: bool) -> str:
        """Request another start of this job from the scheduler: see :meth:`ClusterEnvironment.run_again`."""
        return ""


class SlurmJob(Job):
    """A job of Slurm's: a step of any number of tasks, a batch script, a shell of ``salloc``.

    Args:
        requeue: put the job back into the queue when ``requeue_signal`` has stopped a fit that can go on.
            TORCHHAL_REQUEUE=1 or 0 in the environment takes precedence.
        requeue_signal: a number or name, that of ``sbatch --signal``. It stops a fit as SIGTERM does, requeued or
            not.

    Raises:
        ConfigurationError: no such signal, or one that can't be handled.
    """

    def __init__(self, *, requeue: bool = False, requeue_signal: int | str = "SIGUSR1") -> None:
        if not isinstance(requeue, bool):
            raise ConfigurationError(f"'requeue' must be a bool (got {requeue!r})")
        self.requeue = requeue
        self.stop_signals = (_signal(requeue_signal),)

    def check(self) -> str:
        _switch()
        return ""

    def run_again(self, signum: int, *, continues: bool) -> str:
        switch = _switch()
        # The sender of SIGTERM, scancel or a preemption, determines whether the job is requeued.
        if signum not in self.stop_signals or not (self.requeue if switch is None else switch):
            return ""
        if not continues:
            return (
                "the job is not requeued, for it would not go on from here: call fit with ckpt_path='last', and keep "
                "the ModelCheckpoint"
            )
        return requeue()


def current_job() -> Job:
    """Return the job that the variables of this process describe."""
    return SlurmJob() if given("SLURM_JOB_ID") else Job()


def requeue() -> str:
    """Requeue this job of Slurm's, and return the result when Slurm begins to end its processes.

    Until then no process may exit by itself: if the step ends while the job is being requeued, the batch script ends
    the job in every second case, which then has failed and is not started again (Slurm 22.05).

    An element of an array is identified by its own name: the job number of one element is that of the whole array.
    """
    array, task = given("SLURM_ARRAY_JOB_ID"), given("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else given("SLURM_JOB_ID")
    with SignalRecorder() as noted:
        if shutil.which("scontrol") is None:
            return f"job {job} is not requeued: there is no scontrol here (in a container, mount Slurm's client)"
        ask = ["/bin/sh", "-c", _ASK, "sh", job]
        try:
            done = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"job {job} is not requeued: {error}"
        if done.returncode < 0:
            return f"job {job} may not be requeued: scontrol {describe_exit(done.returncode)}"
        if done.returncode:
            return f"job {job} is not requeued: scontrol says {(done.stderr or done.stdout).strip()!r}"
        deadline = time.monotonic() + _END_TIMEOUT
        while not noted.received and time.monotonic() < deadline:
            time.sleep(0.05)
    return f"job {job} is requeued"


def _switch() -> bool | None:
    """Return the value of TORCHHAL_REQUEUE; None where it isn't set."""
    value = given(_SWITCH)
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{_SWITCH} must be 1 or 0 in the environment (got {value!r})")
    return value == "1" if value else None


def _signal(value: int | str) -> int:
    try:
        found = signal.Signals[value] if isinstance(value, str) else signal.Signals(value)
    except (KeyError, ValueError):
        raise ConfigurationError(f"'requeue_signal' must be a signal, such as 'SIGUSR1' (got {value!r})") from None
    if found.name in ("SIGKILL", "SIGSTOP") or isinstance(value, bool):
        raise ConfigurationError(f"'requeue_signal' must be a signal that can be handled (got {value!r})")
    return int(found)
