"""Defective cluster environments: each differs from one of core's, or from acme-run's, in one thing."""

from __future__ import annotations

import os
import subprocess

from sound_components import TABLES, AcmeEnvironment
from zoo import caught_by

from torchhal.cluster import TorchElasticEnvironment, read_address, read_int, read_text
from torchhal.cluster.lsf import LSFEnvironment
from torchhal.cluster.slurm import SlurmEnvironment
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError


@caught_by("ENV-13")
class AllocationAsStepEnvironment(SlurmEnvironment):
    """Takes every process inside of an allocation of Slurm's for a task that srun has started."""

    # "Return whether this process was started by this environment. [...] False in a shell or notebook inside of an
    # allocation, and in processes of all other launchers."
    # `python train.py` in a shell of salloc, in a batch script without srun, or in a notebook on a node, which would
    # train on the node's devices, ends with an error about variables of a step that doesn't exist.

    @classmethod
    def detect(cls) -> bool:
        return launched_by() is None and bool(os.environ.get("SLURM_JOB_ID", "").strip())


@caught_by("ENV-74")
class LastDigitsPortEnvironment(LSFEnvironment):
    """Makes the port of the last four digits of the job's number, without the index in an array."""

    # "Port on which rank 0 listens, from 1 to 65535; the same on all ranks, another one for another job."
    # All elements of an array have one number, and 14711 ends like 24711: two such jobs on one host meet at the same
    # port, where the second can't listen or its ranks reach the first job's.

    def _port(self) -> int:
        return 10_000 + read_int("LSB_JOBID", 0) % 10_000


@caught_by("ENV-20")
class BlockwiseNodesEnvironment(TorchElasticEnvironment):
    """Computes the node's rank as that of the process divided by the processes of this node."""

    # "Return this node's rank among all nodes, from 0." / "Return the number of processes on this node; nodes may
    # differ."
    # With one process on the first node and three on the second, ranks 1 and 2 count as those of node 0; with three and
    # one, rank 3 is on node 3 of two. What is done once per node, such as a download, is done on the wrong ranks.

    def node_rank(self) -> int:
        return self.global_rank() // self.local_world_size()


@caught_by("ENV-06", tables=TABLES)
class LoopbackFallbackEnvironment(AcmeEnvironment):
    """Takes 127.0.0.1 for rank 0's host where the launcher's variable is missing."""

    # "A missing or garbled variable raises ConfigurationError naming it." / "Host on which rank 0 listens; the same on
    # all ranks."
    # Where the variable isn't passed into a container, the ranks of every node but the first wait for a rank 0 on their
    # own host, until the timeout, and no message says why.

    @property
    def main_address(self) -> str:
        if not os.environ.get("ACME_HEAD", "").strip():
            return "127.0.0.1"
        return read_address("ACME_HEAD")


@caught_by("ENV-11", tables=TABLES)
class TotalOnlyEnvironment(AcmeEnvironment):
    """Compares the number of all processes with the request, and not how they lie on the nodes."""

    # "Raise an error when the job has another size than the user requested." / "num_devices: number of processes per
    # node that the user's settings mean. num_nodes: number of nodes that the user's settings mean."
    # Asked for 2 devices on 2 nodes and started as 4 processes on one, the job passes: two processes have no device
    # of their own, which is an IndexError far from its cause, or they share one and run out of memory.

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        super().validate_settings(num_devices=self.local_world_size(), num_nodes=self.num_nodes())  # contradictions
        started, asked = self.world_size(), num_devices * num_nodes
        if started != asked:
            raise ConfigurationError(
                f"acme-run started {started} processes, and the Trainer asks for {asked} ({num_devices} on each of "
                f"{num_nodes} nodes): make both the same, or say devices='auto' and num_nodes='auto'"
            )


@caught_by("ENV-77")
class CheckedRequeueEnvironment(SlurmEnvironment):
    """Asks scontrol whether the job may be requeued, and raises where scontrol is missing or fails."""

    # "Called on rank 0 when a signal has stopped a fit that has saved its state, while the other ranks wait for its
    # return. Never raises."
    # In a container without Slurm's client, or while the controller is restarted, the orderly end of a fit becomes a
    # FileNotFoundError or CalledProcessError of rank 0: the job counts as failed and its dependents don't start.

    def run_again(self, signum: int, *, continues: bool) -> str:
        if signum in self.stop_signals and continues:
            ask = ["scontrol", "show", "job", read_text("SLURM_JOB_ID")]
            shown = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True).stdout
            if "Requeue=0" in shown.split():
                return "the job is not requeued, as it was submitted with --no-requeue"
        return super().run_again(signum, continues=continues)
