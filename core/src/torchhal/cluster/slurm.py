"""Slurm: the tasks of a step, as srun starts them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar, TypeVar

from torchhal.cluster import _hostlist as hostlist
from torchhal.cluster._env_vars import given, read_int, read_text
from torchhal.cluster._external import ExternalEnvironment
from torchhal.cluster._job import SlurmJob
from torchhal.cluster._topology import port_from_job_id
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError

_T = TypeVar("_T")

_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "MPI_LOCALNRANKS", "PMI_RANK"),
)
"""(size, size on this node, rank) of the launchers that start their own daemons by srun."""


class SlurmEnvironment(ExternalEnvironment):
    """A task of a step with several tasks.

    An allocation alone (a batch script, a shell of ``salloc``) has started no processes, and a step of one task, such
    as ``srun --pty bash``, is one process that torchhal may multiply: neither is detected. Every number is the step's,
    never the job's, and none is computed from another: nodes may hold different numbers of tasks, in any order.

    The ranks meet on the step's first host, at a port made from the job, the step and the number of its restarts.

    Args:
        requeue: see :class:`~torchhal.cluster._job.SlurmJob`; so is ``requeue_signal``.

    Raises:
        ConfigurationError: no such signal, or one that can't be handled.
    """

    name: ClassVar[str] = "slurm"
    priority: ClassVar[int] = 70
    features: ClassVar[frozenset[str]] = frozenset({"host_lists"})
    launcher: ClassVar[str] = "srun"

    def __init__(self, *, requeue: bool = False, requeue_signal: int | str = "SIGUSR1") -> None:
        super().__init__()
        self._job = SlurmJob(requeue=requeue, requeue_signal=requeue_signal)
        self._stop_signals = self._job.stop_signals

    @classmethod
    def detect(cls) -> bool:
        if launched_by() is not None or not given("SLURM_STEP_ID") or given("SLURM_STEP_NUM_TASKS") == "1":
            return False
        return not _mpi_is_inside() and not _in_a_batch_script()

    def world_size(self) -> int:
        tasks = read_int("SLURM_STEP_NUM_TASKS", 1)
        for name in ("SLURM_NTASKS", "SLURM_NPROCS"):
            if given(name) and read_int(name, 1) != tasks:
                raise ConfigurationError(
                    f"Slurm's variables contradict each other: SLURM_STEP_NUM_TASKS={tasks}, but {name}={given(name)}. "
                    f"If {name} was exported by hand, unset it; if this process is no task of a step, say "
                    "TORCHHAL_CLUSTER=none"
                )
        return tasks

    def global_rank(self) -> int:
        return read_int("SLURM_PROCID", 0)

    def local_rank(self) -> int:
        return read_int("SLURM_LOCALID", 0)

    def node_rank(self) -> int:
        return read_int("SLURM_NODEID", 0)

    def local_world_size(self) -> int:
        counts, node = self._tasks_per_node(), _position()
        if node >= len(counts):
            raise ConfigurationError(
                f"Slurm's variables contradict each other: SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE="
                f"{given('SLURM_STEP_TASKS_PER_NODE')} counts {len(counts)} node(s)"
            )
        return counts[node]

    def num_nodes(self) -> int:
        return len(self._tasks_per_node())

    def node_of(self, rank: int) -> str | None:
        """Return the host's name, under Slurm's default distribution; None under another, which has no variable."""
        if not (given("SLURM_DISTRIBUTION") or "block").startswith("block"):
            return None
        hosts, counts = _parsed("SLURM_STEP_NODELIST", hostlist.hosts), self._tasks_per_node()
        of_ranks = [host for host, count in zip(hosts, counts, strict=False) for _ in range(count)]
        mine = self.global_rank()
        known = mine < len(of_ranks) and of_ranks[mine] == given("SLURMD_NODENAME") and rank < len(of_ranks)
        return of_ranks[rank] if known else None

    def _address(self) -> str:
        if given("SLURM_DISTRIBUTION").startswith("arbitrary"):
            return _first_line_of_host_file()
        return _parsed("SLURM_STEP_NODELIST", hostlist.hosts)[0]

    def job_id(self) -> str:
        job = given("SLURM_HET_JOB_ID") or given("SLURM_JOB_ID")
        return f"step {given('SLURM_STEP_ID')} of Slurm's job {job}"

    def _port(self) -> int:
        # Not the last digits of the job's number: those of other jobs end alike, and two steps of a job share it.
        return port_from_job_id(
            read_text("SLURM_JOB_ID"), read_text("SLURM_STEP_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
        )

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        counts, world = self._tasks_per_node(), self.world_size()
        if sum(counts) != world:
            raise ConfigurationError(
                f"Slurm's variables contradict each other: SLURM_STEP_NUM_TASKS={world}, but "
                f"SLURM_STEP_TASKS_PER_NODE={given('SLURM_STEP_TASKS_PER_NODE')} makes {sum(counts)}"
            )
        self._job.check()  # now, not when the signal arrives
        super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)
        here = given("SLURMD_NODENAME")
        if self.global_rank() == 0 and here and not given("MASTER_ADDR") and here != self._address():
            # If the order of hosts isn't the list's, all ranks would connect to a host that doesn't serve.
            raise ConfigurationError(
                f"rank 0 runs on {here}, but the step's hosts begin with {self._address()} "
                f"(SLURM_DISTRIBUTION={given('SLURM_DISTRIBUTION') or 'not set'}): set MASTER_ADDR={here} for all tasks"
            )

    def run_again(self, signum: int, *, continues: bool) -> str:
        return self._job.run_again(signum, continues=continues)

    def _tasks_per_node(self) -> list[int]:
        return _parsed("SLURM_STEP_TASKS_PER_NODE", hostlist.tasks_per_node)


def _mpi_is_inside() -> bool:
    """Return whether mpirun, started in this allocation, started this process.

    Its daemons are the step's tasks, and what they start inherits their variables. Under ``srun --mpi=...`` both sets
    have the same values.
    """
    try:
        here = str(hostlist.tasks_per_node(given("SLURM_STEP_TASKS_PER_NODE"))[_position()])
    except (ValueError, IndexError):  # raises when the numbers are read
        here = ""
    for size, local_size, rank in _MPI:
        if not given(size):
            continue
        if given(size) != given("SLURM_STEP_NUM_TASKS") or given(rank) != given("SLURM_PROCID"):
            return True
        if given(local_size) and here and given(local_size) != here:
            return True
    return False


def _in_a_batch_script() -> bool:
    """Return whether this is a batch script and not a task.

    One that was submitted from inside a step has that step's variables, which may equal those of its own job
    exactly.
    """
    try:
        with open(f"/proc/{int(given('SLURM_TASK_PID'))}/comm") as file:
            return file.read().strip() == "slurm_script"
    except (ValueError, OSError):  # no such variable, no such process here
        return False


def _position() -> int:
    """Return this node's place in the step's list of nodes, which in a heterogeneous job isn't SLURM_NODEID."""
    try:
        return hostlist.hosts(given("SLURM_STEP_NODELIST")).index(given("SLURMD_NODENAME"))
    except ValueError:
        return read_int("SLURM_NODEID", 0)


def _parsed(name: str, parse: Callable[[str], _T]) -> _T:
    text = read_text(name)
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigurationError(f"{name} can't be read (got {text!r}): {error}") from error


def _first_line_of_host_file() -> str:
    """Return the host of rank 0 under ``-m arbitrary``: node lists are sorted, the file is not."""
    path = read_text("SLURM_HOSTFILE", hint="with SLURM_DISTRIBUTION=arbitrary it holds the order of the hosts")
    try:
        with open(path) as file:
            first = next((line.strip() for line in file if line.strip()), "")
    except OSError as error:
        raise ConfigurationError(
            f"SLURM_HOSTFILE, which says where rank 0 runs with SLURM_DISTRIBUTION=arbitrary, can't be read "
            f"({path}: {error.strerror}): set MASTER_ADDR to rank 0's host"
        ) from error
    if not first:
        raise ConfigurationError(f"SLURM_HOSTFILE is empty ({path}): set MASTER_ADDR to rank 0's host")
    return first.partition("*")[0]
