"""Cluster environments that differ from sound ones in one mistake each."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from typing import Any, ClassVar

from sound_components import TABLES, AcmeEnvironment
from zoo import caught_by

from torchhal.cluster import port_from_job_id, read_text
from torchhal.cluster._topology import gather_topology
from torchhal.cluster.flux import FluxEnvironment
from torchhal.cluster.lsf import LSFEnvironment
from torchhal.errors import ConfigurationError


@caught_by("ENV-12", tables=TABLES)
class OutermostFirstEnvironment(AcmeEnvironment):
    """Its priority is above that of torchrun, which a task of acme-run may start on each node."""

    # Contract, priority: "Priority among several detected environments, of which the highest is taken: the innermost
    # launcher."
    # `acme-run --tasks-per-node 1 torchrun ...`: torchrun's workers inherit the variables of acme-run's task, so all
    # workers of a node take themselves for the same rank of a smaller job: they wait for each other in vain, or one
    # of them trains and the others fail.

    priority: ClassVar[int] = 90


@caught_by("ENV-74")
class ArrayElementsAlikeEnvironment(LSFEnvironment):
    """Job id and port come from LSB_JOBID alone, which is the same for all elements of a job array."""

    # Contract, main_port: "the same on all ranks, another one for another job"; job_id: "Return what distinguishes
    # this job from another one whose ranks meet at the same address and port."
    # Two elements of an array whose first ranks share a host meet at one port: the second can't serve there, or its
    # ranks join the first one's job and train in it.

    def job_id(self) -> str:
        job = os.environ.get("LSB_JOBID", "").strip()
        return f"LSF's job {job}" if job else ""

    def _port(self) -> int:
        return port_from_job_id(read_text("LSB_JOBID"))


@caught_by("ENV-11", tables=TABLES)
class ProductOnlyEnvironment(AcmeEnvironment):
    """``validate_settings`` compares the number of processes of the job only, as the product of what is requested."""

    # Contract, validate_settings: "Raise an error when the job has another size than the user requested. ...
    # num_devices: number of processes per node that the user's settings mean. num_nodes: number of nodes that the
    # user's settings mean. ... ConfigurationError: they differ; the message shows both numbers."
    # devices=4, num_nodes=2 in a job of four nodes with two tasks each is accepted: half of each node's devices idle.
    # The other way round, the third process of a node fails with an IndexError while the others wait for it.

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        rank, local_rank, node = self.global_rank(), self.local_rank(), self.node_rank()  # refused if out of bounds
        if local_rank > rank or node > rank:
            raise ConfigurationError(
                f"acme-run's variables contradict each other: ACME_TASK={rank}, ACME_LOCAL_TASK={local_rank}, "
                f"ACME_NODE={node}"
            )
        started, asked = self.world_size(), num_devices * num_nodes
        if started != asked:
            raise ConfigurationError(
                f"acme-run started {started} processes, and the Trainer asks for {asked} ({num_devices} on each of "
                f"{num_nodes} nodes): make both the same, or say devices='auto' and num_nodes='auto'"
            )


@caught_by("ENV-77", tables=TABLES)
class RequeueOrDieEnvironment(AcmeEnvironment):
    """``run_again`` raises where the scheduler's command isn't there, or refuses."""

    # Contract, run_again: "Called on rank 0 when a signal has stopped a fit that has saved its state, while the other
    # ranks wait for its return. Never raises."
    # In a container without the scheduler's client, or where the job may not be requeued, the orderly stop becomes a
    # FileNotFoundError or CalledProcessError on rank 0: the job counts as failed, not as stopped by its signal.

    def run_again(self, signum: int, *, continues: bool) -> str:
        if signum not in self.stop_signals or not continues:
            return ""
        job = self.job_id()
        subprocess.run(["acme-requeue", job], check=True, capture_output=True, timeout=60)
        return f"job {job} is requeued"


@caught_by("ENV-52")
class OwnPatienceEnvironment(LSFEnvironment):
    """``join`` waits for the other ranks as long as the default says, not as long as it is told."""

    # Contract, join: "timeout: the longest wait for the other ranks. Raises TorchhalError: a rank has not come within
    # `timeout`."
    # With a timeout of an hour, for hosts that come up one after the other, the job fails after ten minutes; with one
    # of 30 seconds, a missing rank blocks the others' paid nodes for ten minutes.

    def join(self, timeout: timedelta) -> None:
        if self._place is None and not self._says_place():
            self._place = gather_topology(self)


@caught_by("ENV-51")
class CleansUpAddressEnvironment(FluxEnvironment):
    """``teardown`` deletes MASTER_ADDR and MASTER_PORT, which ``join`` exports, though the user had set them before."""

    # Contract, teardown: "Restore what this object changed, and only that."
    # On several nodes Flux needs a MASTER_ADDR that the user has set: after the first fit it is gone, and a second
    # one, a test after the fit, or another library in the same program finds no address any more.

    def __init__(self) -> None:
        super().__init__()
        self._exported = False

    def join(self, timeout: timedelta) -> None:
        super().join(timeout)
        if self.world_size() > 1 and not self._exported:  # for libraries that read torch's variables
            os.environ.update(MASTER_ADDR=self.main_address, MASTER_PORT=str(self.main_port))
            self._exported = True

    def teardown(self) -> None:
        super().teardown()
        if self._exported:
            self._exported = False
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_exported": False}
