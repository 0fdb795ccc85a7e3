"""Define the environment variables that launchers set, and the launchers' commands.

The variables are those of real runs but for names of hosts and jobs; where a launcher doesn't run on one machine, those
of its documentation.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Final

from torchhal.distributed.process import rank_variables
from torchhal_conformance._launcher_worlds import LauncherWorld, Layout, Table

_Tables = Callable[[Layout], Iterator[dict[str, str]]]

_ALL: Final = ("2+2", "1+1+1", "4", "2+1", "3+1")
_DEALT: Final = (*_ALL, "3+1 cyclic")
_EVEN: Final = ("2+2", "1+1+1", "4")


def _torchelastic(layout: Layout) -> Iterator[dict[str, str]]:
    size, nodes = str(layout.world_size), str(len(layout.sizes))
    for rank, node, local in layout.places:
        yield {
            "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node), "ROLE_RANK": str(rank),
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": str(layout.sizes[node]), "GROUP_WORLD_SIZE": nodes,
            "ROLE_WORLD_SIZE": size, "ROLE_NAME": "default", "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "run-17", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
        }  # fmt: skip


def _slurm(layout: Layout) -> Iterator[dict[str, str]]:
    size, nodes = str(layout.world_size), str(len(layout.sizes))
    hosts = f"n[1-{nodes}]" if len(layout.sizes) > 1 else "n1"
    groups = [(count, len(list(group))) for count, group in groupby(layout.sizes)]
    per_node = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    for rank, node, local in layout.places:
        yield {
            "SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": hosts,
            "SLURM_NODELIST": hosts, "SLURM_STEP_NODELIST": hosts, "SLURM_NNODES": nodes,
            "SLURM_JOB_NUM_NODES": nodes, "SLURM_STEP_NUM_NODES": nodes, "SLURM_NTASKS": size, "SLURM_NPROCS": size,
            "SLURM_STEP_NUM_TASKS": size,
            "SLURM_TASKS_PER_NODE": per_node, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"n{node + 1}",
            **({"SLURM_DISTRIBUTION": "cyclic"} if layout.cyclic else {}),  # set where srun was given -m
        }  # fmt: skip


def _of_torchhal(layout: Layout, kind: str) -> Iterator[dict[str, str]]:
    """Yield the variables of processes that a launcher of torchhal's has started."""
    for rank, node, local in layout.places:
        yield rank_variables(
            launch_id="5d0c", kind=kind, rank=rank, local_rank=local, node_rank=node, world_size=layout.world_size,
            local_world_size=layout.sizes[node], address="n1", port=29511,
        )  # fmt: skip


def _local(layout: Layout) -> Iterator[dict[str, str]]:
    return _of_torchhal(layout, "subprocess_script")


def _sagemaker(layout: Layout) -> Iterator[dict[str, str]]:
    hosts = json.dumps([f"algo-{node + 1}" for node in range(len(layout.sizes))])
    for row, place in zip(_local(layout), layout.places, strict=True):
        yield {**row, "SM_HOSTS": hosts, "SM_CURRENT_HOST": f"algo-{place.node_rank + 1}"}


def _openmpi(layout: Layout) -> Iterator[dict[str, str]]:
    size = str(layout.world_size)
    for rank, node, local in layout.places:
        yield {
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(layout.sizes[node]), "OMPI_COMM_WORLD_NODE_RANK": str(local),
            "OMPI_UNIVERSE_SIZE": size, "OMPI_APP_CTX_NUM_PROCS": size, "PMIX_RANK": str(rank),
            "PMIX_NAMESPACE": "395575297", "OMPI_MCA_orte_hnp_uri": "395575296.0;tcp://10.99.0.100:35001",
            "OMPI_MCA_orte_num_nodes": str(len(layout.sizes)),
        }  # fmt: skip


def _mpich(layout: Layout) -> Iterator[dict[str, str]]:
    for rank, node, local in layout.places:
        yield {
            "PMI_RANK": str(rank), "PMI_SIZE": str(layout.world_size), "PMI_FD": "6", "MPI_LOCALRANKID": str(local),
            "MPI_LOCALNRANKS": str(layout.sizes[node]), "HYDI_CONTROL_FD": "7",
        }  # fmt: skip


def _lsf(layout: Layout) -> Iterator[dict[str, str]]:
    hosts = " ".join(f"n{node + 1} {size}" for node, size in enumerate(layout.sizes))
    for rank, node, local in layout.places:
        yield {
            "LSB_JOBID": "815", "LSB_JOBINDEX": "0", "LSB_DJOB_RANKFILE": "/tmp/ranks",
            "LSB_MCPU_HOSTS": f"b1 1 {hosts}",
            "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_SIZE": str(layout.world_size),
            "JSM_NAMESPACE_LOCAL_RANK": str(local), "JSM_NAMESPACE_LOCAL_SIZE": str(layout.sizes[node]),
        }  # fmt: skip


def _flux(layout: Layout) -> Iterator[dict[str, str]]:
    size = str(layout.world_size)
    for rank, _, local in layout.places:
        yield {
            "FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(local), "FLUX_JOB_SIZE": size,
            "FLUX_JOB_NNODES": str(len(layout.sizes)), "FLUX_JOB_ID": "\u019238rBqEWT", "PMI_RANK": str(rank),
            "PMI_SIZE": size,
        }  # fmt: skip


def _kubeflow(layout: Layout) -> Iterator[dict[str, str]]:
    for rank, _, _ in layout.places:
        yield {
            "KUBERNETES_PORT": "tcp://10.96.0.1:443", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
            "WORLD_SIZE": str(layout.world_size), "RANK": str(rank),
        }  # fmt: skip


def _env(layout: Layout) -> Iterator[dict[str, str]]:
    for rank, _, local in layout.places:
        yield {"RANK": str(rank), "WORLD_SIZE": str(layout.world_size), "LOCAL_RANK": str(local)}


_MEETING: Final = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
"""Set by the user, where the launcher doesn't say where rank 0 is."""


def _worlds(make: _Tables, layouts: Iterable[str], extra: Table | None = None) -> dict[str, LauncherWorld]:
    found = {}
    for text in layouts:
        layout = Layout.parse(text)
        found[text] = LauncherWorld(layout, tuple({**row, **(extra or {})} for row in make(layout)))
    return found


WORLDS: Final[dict[str, dict[str, LauncherWorld]]] = {
    "torchelastic": _worlds(_torchelastic, _ALL),
    "slurm": _worlds(_slurm, _DEALT),
    "local": _worlds(_local, _EVEN),
    "openmpi": _worlds(_openmpi, _DEALT, _MEETING),
    "mpich": _worlds(_mpich, _DEALT, _MEETING),
    "lsf": _worlds(_lsf, _DEALT, _MEETING),
    "flux": _worlds(_flux, _DEALT, _MEETING),
    "kubeflow": _worlds(_kubeflow, ("1+1+1+1", "1+1+1")),
    "sagemaker": _worlds(_sagemaker, ("2+2", "1+1+1")),
    "env": _worlds(_env, _DEALT, _MEETING),
}
"""Alias of a cluster environment -> layout -> a job of its launcher.

torchrun fills one node after the other, torchhal starts as many processes on every node, a pod of Kubeflow's has one.
"""

LAUNCHED_BY_STRATEGY: Final = frozenset({"local", "sagemaker"})
"""Aliases of the environments whose processes the strategy starts."""


def owned_worlds(alias: str) -> dict[str, LauncherWorld]:
    """Return the worlds of an environment that owns the launch: torchhal's variables, with its alias as their kind."""
    return _worlds(partial(_of_torchhal, kind=alias), _EVEN)


_TWO_BY_TWO: Final = Layout.parse("2+2")
TABLES: Final[dict[str, tuple[dict[str, str], ...]]] = {
    "torchelastic": tuple(_torchelastic(_TWO_BY_TWO)),
    "slurm": tuple(_slurm(_TWO_BY_TWO)),
    "local": tuple(_local(_TWO_BY_TWO)),
    "openmpi": tuple(_openmpi(_TWO_BY_TWO)),
    "mpich": tuple(_mpich(_TWO_BY_TWO)),
    "lsf": tuple(_lsf(_TWO_BY_TWO)),
    "kubeflow": tuple(_kubeflow(_TWO_BY_TWO)),
}
"""Alias of a cluster environment -> what its launcher alone sets for each of four ranks; others are checked there."""

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
    **dict.fromkeys(LAUNCHED_BY_STRATEGY, ()),
}  # fmt: skip
"""Alias of a cluster environment -> what starts two processes of the command behind it. Empty: the strategy does."""

_KNOWN: Final = {
    *(name for worlds in WORLDS.values() for world in worlds.values() for row in world.tables for name in row),
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
