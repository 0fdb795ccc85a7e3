"""Four cluster environments with one mistake each, over torchhal's for LSF, torchrun and Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess

from zoo import caught_by

from torchhal.cluster import TorchElasticEnvironment, read_text
from torchhal.cluster.lsf import LSFEnvironment
from torchhal.cluster.slurm import SlurmEnvironment
from torchhal.errors import ConfigurationError


@caught_by("ENV-75")
class HashedArrayPortEnvironment(LSFEnvironment):
    """In job arrays the port is made by hash() of a text, which differs from process to process."""

    # cluster-environment.md, main_port: "Port on which rank 0 listens, from 1 to 65535; the same on all ranks, another
    # one for another job."
    # Suffers: each process of an array job has another PYTHONHASHSEED, so every rank waits at another port until the
    # timeout; jobs that are no arrays take another way and work. Within one process all looks well.

    def _port(self) -> int:
        job, element = read_text("LSB_JOBID"), self._element()
        if not element:
            return super()._port()
        return 12_000 + hash(f"{job}[{element}]") % 20_000  # elements share the number of the job

    def job_id(self) -> str:
        return f"{super().job_id()}[{self._element()}]" if self._element() else super().job_id()

    @staticmethod
    def _element() -> str:
        index = os.environ.get("LSB_JOBINDEX", "").strip()
        return "" if index == "0" else index


@caught_by("ENV-11")
class ComparesProductEnvironment(TorchElasticEnvironment):
    """validate_settings compares the number of all processes only."""

    # cluster-environment.md, validate_settings: "Raise an error when the job has another size than the user
    # requested. ... `num_devices`: number of processes per node that the user's settings mean. ...
    # ConfigurationError: they differ; the message shows both numbers."
    # Suffers: two nodes of two processes pass for devices=4 on one node, or devices=1 on four: ranks index devices that
    # a node doesn't have, share one, or leave half of them idle, and samplers and paths per node are those of another
    # job.

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        world, local = self.world_size(), self.local_world_size()
        if self.global_rank() >= world or self.local_rank() >= local:
            raise ConfigurationError(
                f"torchrun's variables contradict each other: RANK={self.global_rank()} of WORLD_SIZE={world}, "
                f"LOCAL_RANK={self.local_rank()} of LOCAL_WORLD_SIZE={local}"
            )
        if world != num_devices * num_nodes:
            raise ConfigurationError(
                f"torchrun started {world} process(es), {local} on this node, but {num_devices} device(s) on "
                f"{num_nodes} node(s) are asked for: {num_devices * num_nodes}"
            )


@caught_by("ENV-77")
class BelievesSchedulerEnvironment(SlurmEnvironment):
    """run_again reports a requeue whatever scontrol has answered."""

    # cluster-environment.md, run_again: "A message for the log; `""` where no new start was requested, or not for this
    # signal." and "Request another start of this job from the scheduler."
    # Suffers: scontrol refuses (a job submitted with --no-requeue, a controller that is down), the log says "is
    # requeued", and the run that should have gone on overnight is simply over.

    def run_again(self, signum: int, *, continues: bool) -> str:
        if not continues or signum not in self._job.stop_signals or shutil.which("scontrol") is None:
            return super().run_again(signum, continues=continues)
        if not _requeues(self._job.requeue):
            return ""
        job = read_text("SLURM_JOB_ID")
        try:
            subprocess.run(["scontrol", "requeue", job], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"job {job} is not requeued: {error}"
        return f"job {job} is requeued"


def _requeues(default: bool) -> bool:
    return {"1": True, "0": False}.get(os.environ.get("TORCHHAL_REQUEUE", "").strip(), default)


@caught_by("ENV-74")
class NamesJobWithoutStepEnvironment(SlurmEnvironment):
    """job_id() is the number of Slurm's job, which all steps of it have."""

    # cluster-environment.md, job_id: "Return what distinguishes this job from another one whose ranks meet at the same
    # address and port."
    # Suffers: two `srun ... &` in a batch script that exports MASTER_ADDR and MASTER_PORT: ranks of one step join those
    # of the other in place of being refused, and the two runs train as one mixture, or hang.

    def job_id(self) -> str:
        return f"Slurm's job {os.environ.get('SLURM_HET_JOB_ID') or read_text('SLURM_JOB_ID')}"
