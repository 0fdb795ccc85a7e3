"""Define the environment variables that launchers set, and the launchers' commands.

The tables are for two nodes with two processes each, recorded from real runs but for names of hosts and jobs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

_NODES: Final = ((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1))
"""(global, node, local) rank of each process."""
_PACKED: Final = ((0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0))
_CYCLIC: Final = ((0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 0, 2))


def _torchelastic(ranks: tuple[tuple[int, int, int], ...]) -> tuple[dict[str, str], ...]:
    sizes = [sum(node == other for _, other, _ in ranks) for node in range(2)]
    return tuple(
        {
            "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node), "ROLE_RANK": str(rank),
            "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": str(sizes[node]), "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "4",
            "ROLE_NAME": "default", "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run-17",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
        }
        for rank, node, local in ranks
    )  # fmt: skip


def _slurm(ranks: tuple[tuple[int, int, int], ...], per_node: str) -> tuple[dict[str, str], ...]:
    return tuple(
        {
            "SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NODELIST": "n[1-2]", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NNODES": "2",
            "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_TASKS_PER_NODE": per_node, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"n{node + 1}",
        }
        for rank, node, local in ranks
    )  # fmt: skip


def _local() -> tuple[dict[str, str], ...]:
    return tuple(
        {
            "TORCHHAL_LAUNCH_ID": "5d0c", "TORCHHAL_LAUNCH_KIND": "subprocess_script", "RANK": str(rank),
            "LOCAL_RANK": str(local), "NODE_RANK": str(node), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "n1", "MASTER_PORT": "29511",
        }
        for rank, node, local in _NODES
    )  # fmt: skip


TABLES: Final[dict[str, tuple[dict[str, str], ...]]] = {
    "torchelastic": _torchelastic(_NODES),
    "slurm": _slurm(_NODES, "2(x2)"),
    "local": _local(),
    "openmpi": tuple(
        {
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": str(local), "OMPI_UNIVERSE_SIZE": "4",
            "OMPI_APP_CTX_NUM_PROCS": "4", "PMIX_RANK": str(rank), "PMIX_NAMESPACE": "395575297",
            "OMPI_MCA_orte_hnp_uri": "395575296.0;tcp://10.99.0.100:35001", "OMPI_MCA_orte_num_nodes": "2",
        }
        for rank, _, local in _NODES
    ),
    "mpich": tuple(
        {
            "PMI_RANK": str(rank), "PMI_SIZE": "4", "PMI_FD": "6", "MPI_LOCALRANKID": str(local),
            "MPI_LOCALNRANKS": "2", "HYDI_CONTROL_FD": "7",
        }
        for rank, _, local in _NODES
    ),
    "lsf": tuple(
        {
            "LSB_JOBID": "815", "LSB_DJOB_RANKFILE": "/tmp/ranks", "LSB_MCPU_HOSTS": "b1 1 n1 2 n2 2",
            "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": str(local),
            "JSM_NAMESPACE_LOCAL_SIZE": "2",
        }
        for rank, _, local in _NODES
    ),
    "kubeflow": tuple(
        {
            "KUBERNETES_PORT": "tcp://10.96.0.1:443", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
            "WORLD_SIZE": "4", "RANK": str(rank),
        }
        for rank, _, _ in _NODES
    ),
}  # fmt: skip
"""Alias of a cluster environment -> the variables of each of four ranks."""

UNEVEN: Final[dict[str, tuple[dict[str, str], ...]]] = {
    "torchelastic": _torchelastic(_PACKED),
    "slurm": _slurm(_PACKED, "3,1"),
}
"""The same for nodes of three and of one process, one node after the other."""

UNEVEN_RANKS: Final = _PACKED

CYCLIC: Final[dict[str, tuple[dict[str, str], ...]]] = {"slurm": _slurm(_CYCLIC, "3,1")}
"""The same, dealt to the nodes in turn, as by ``srun -m cyclic``; torchrun deals no such."""

CYCLIC_RANKS: Final = _CYCLIC

INTERACTIVE: Final[dict[str, dict[str, str]]] = {
    "slurm": {
        "SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4",
        "SLURM_NPROCS": "4",
    },
}  # fmt: skip
"""A shell inside of an allocation, which is no process of a job."""

LAUNCHERS: Final[dict[str, tuple[str, ...]]] = {
    "torchelastic": (
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
        "--no-python",
    ),
    "local": (),
}  # fmt: skip
"""Alias of a cluster environment -> what starts two processes of the command behind it. Empty: the strategy does."""

_KNOWN: Final = {
    *(name for table in (*TABLES.values(), *UNEVEN.values()) for row in table for name in row),
    "TORCHHAL_PARENT_PID", "TORCHHAL_REPORT_FD", "TORCHHAL_PARENT_IS_MAIN",
}  # fmt: skip


@contextmanager
def variables(*tables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables of launchers, and no others, in os.environ for the block."""
    before = dict(os.environ)
    for name in _KNOWN & os.environ.keys():
        del os.environ[name]
    for table in tables:
        os.environ.update(table)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
