"""Cluster environments that differ from sound ones in one mistake each."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

from sound_components import TABLES, AcmeEnvironment
from zoo import caught_by

from torchhal.cluster import read_text
from torchhal.cluster.local import LocalEnvironment
from torchhal.cluster.slurm import SlurmEnvironment
from torchhal.errors import ConfigurationError


@caught_by("ENV-12", tables=TABLES)
class OutermostPriorityEnvironment(AcmeEnvironment):
    """Has a priority above those of the launchers that run inside of its tasks."""

    # Contract, priority: "Priority among several detected environments, of which the highest is taken: the innermost
    # launcher."
    # Where each task starts torchrun, its workers take the scheduler's numbers: all of a node count as the same rank,
    # and several processes train, and write, as rank 0.

    priority = 85


@caught_by("ENV-11", tables=TABLES)
class ProductOnlyEnvironment(AcmeEnvironment):
    """Compares the number of all processes with the request, and not those of nodes and of processes per node."""

    # Contract, validate_settings: "ConfigurationError: they differ; the message shows both numbers."
    # Four devices on one node are accepted in a job of two nodes with two processes: local ranks and devices don't
    # belong to each other, and a node's devices are missing when the training begins, or are left idle.

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        rank, local_rank, node = self.global_rank(), self.local_rank(), self.node_rank()
        if local_rank > rank or node > rank:
            raise ConfigurationError(
                f"acme-run's variables contradict each other: ACME_TASK={rank}, ACME_LOCAL_TASK={local_rank}, "
                f"ACME_NODE={node}"
            )
        if self.world_size() != num_devices * num_nodes:
            raise ConfigurationError(
                f"acme-run started {self.world_size()} processes ({self.local_world_size()} on this node, "
                f"{self.num_nodes()} nodes), and the Trainer asks for {num_devices} on each of {num_nodes} nodes: make "
                "both the same, or say devices='auto' and num_nodes='auto'"
            )


@caught_by("ENV-77", tables=TABLES)
class RaisingResubmitEnvironment(AcmeEnvironment):
    """Raises where the scheduler's command is missing or refuses the job."""

    # Contract, run_again: "Called on rank 0 when a signal has stopped a fit that has saved its state, while the other
    # ranks wait for its return. Never raises."
    # In a container without the command rank 0 ends with a traceback instead of the signal's status, and a job that
    # has saved counts as failed.

    def run_again(self, signum: int, *, continues: bool) -> str:
        if signum not in self.stop_signals or not continues:
            return ""
        subprocess.run(["acme-requeue", self.job_id()], capture_output=True, check=True, timeout=60)
        return f"job {self.job_id()} is requeued"


@caught_by("ENV-73")
class PoppedAddressEnvironment(LocalEnvironment):
    """Exports where the ranks meet, and at the end deletes these variables whoever has set them."""

    # Contract, teardown: "Restore what this object changed, and only that."
    # MASTER_ADDR and MASTER_PORT that the user had exported are gone after a fit: the next one on several nodes, or
    # the user's own init_process_group, finds no address.

    def __init__(self) -> None:
        super().__init__()
        self._exported = False

    def set_rendezvous(self, address: str, port: int) -> None:
        super().set_rendezvous(address, port)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)  # for libraries that read them
        self._exported = True

    def teardown(self) -> None:
        super().teardown()
        if self._exported:
            os.environ.pop("MASTER_ADDR", None)
            os.environ.pop("MASTER_PORT", None)
            self._exported = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_exported": False}


@caught_by("ENV-76", tables=TABLES)
class WrongDivisorEnvironment(AcmeEnvironment):
    """Divides a rank by the number of nodes to find its node."""

    # Contract, node_of: "Return the node of any rank, to report which host is missing."
    # Right only for as many nodes as processes per node: in a job of three nodes with one process each, and of one
    # with several, the error about a rank that hangs names a host on which nothing is wrong.

    def node_of(self, rank: int) -> int:
        return rank // self.num_nodes()


@caught_by("ENV-06")
class FirstNodesTasksEnvironment(SlurmEnvironment):
    """Takes the first number of SLURM_STEP_TASKS_PER_NODE for every node."""

    # Contract, local_world_size: "Return the number of processes on this node; nodes may differ."
    # For "2,1" the second node counts two processes and has one: validation refuses the right settings there or
    # accepts wrong ones, and cores and devices are shared out among processes that don't exist.

    def local_world_size(self) -> int:
        text = read_text("SLURM_STEP_TASKS_PER_NODE")
        match = re.match(r"[0-9]+", text)
        if match is None or int(match[0]) < 1:
            raise ConfigurationError(f"SLURM_STEP_TASKS_PER_NODE can't be read (got {text!r})")
        return int(match[0])
