"""Blind defects: four cluster environments with one mistake each."""

from __future__ import annotations

import os
import subprocess

from zoo import caught_by

from torchhal.cluster import TorchElasticEnvironment, port_from_job_id, read_text
from torchhal.cluster.slurm import SlurmEnvironment
from torchhal.errors import ConfigurationError


@caught_by("ENV-74")
class StepsShareAPlaceEnvironment(SlurmEnvironment):
    """The port and the job's identity are made from the job's number alone: two steps of one job have the same."""

    # docs/reference/cluster-environment.md, job_id: "Return what distinguishes this job from another one whose ranks
    # meet at the same address and port.", and main_port: "the same on all ranks, another one for another job."
    # "srun train.py a & srun train.py b & wait" in one allocation: the ranks of the two trainings meet at one place
    # under one name, so some train in the other's group, or all of them wait.

    def job_id(self) -> str:
        return f"Slurm's job {os.environ.get('SLURM_HET_JOB_ID') or os.environ.get('SLURM_JOB_ID', '')}"

    def _port(self) -> int:
        return port_from_job_id(read_text("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0"))


@caught_by("ENV-76")
class NodeByDivisionEnvironment(TorchElasticEnvironment):
    """``node_of`` divides by this node's number of processes, which is wrong for ranks on nodes of another size."""

    # docs/reference/cluster-environment.md, node_of: "Return the node of any rank, to report which host is missing.
    # ... None where this process can't determine it alone.", and local_world_size: "nodes may differ."
    # On nodes of three processes and of one the second node says that ranks 1 and 2 are on nodes 1 and 2: an operator
    # drains the wrong host, and one that doesn't exist, while the job hangs again.

    def node_of(self, rank: int) -> int | str | None:
        return rank // self.local_world_size()


@caught_by("ENV-77")
class RequeueRaisesEnvironment(SlurmEnvironment):
    """``run_again`` raises where the scheduler's command is missing, or refuses the request."""

    # docs/reference/cluster-environment.md, run_again: "Called on rank 0 when a signal has stopped a fit that has saved
    # its state, while the other ranks wait for its return. Never raises."
    # With TORCHHAL_REQUEUE=1 in a container without scontrol rank 0 ends with a FileNotFoundError in the midst of an
    # orderly stop, while the others wait for its return until they are killed.

    def run_again(self, signum: int, *, continues: bool) -> str:
        wanted = self._job.requeue
        if os.environ.get("TORCHHAL_REQUEUE", "").strip() in ("0", "1"):
            wanted = os.environ["TORCHHAL_REQUEUE"].strip() == "1"
        if signum not in self.stop_signals or not wanted or not continues:
            return super().run_again(signum, continues=continues)
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, timeout=60)
        return f"job {job} is requeued"


@caught_by("ENV-11")
class SizeByProductEnvironment(TorchElasticEnvironment):
    """``validate_settings`` compares the product of devices and nodes: 2 nodes of 2 pass for 1 node of 4."""

    # docs/reference/cluster-environment.md, validate_settings: "Raise an error when the job has another size than the
    # user requested. ... `num_devices`: number of processes per node that the user's settings mean. `num_nodes`: number
    # of nodes that the user's settings mean."
    # Trainer(devices=4, num_nodes=1) under "torchrun --nnodes 2 --nproc-per-node 2" runs: what the user's code does by
    # its nodes (node-local data, one download a node) is done for one node, and the other's half is missing.

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        world, rank = self.world_size(), self.global_rank()
        local_world, local_rank = self.local_world_size(), self.local_rank()
        if rank >= world or local_rank >= local_world:
            raise ConfigurationError(
                f"torchrun's variables contradict each other: RANK={rank} of WORLD_SIZE={world}, "
                f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_world}"
            )
        if num_devices * num_nodes == world:
            return
        super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)
