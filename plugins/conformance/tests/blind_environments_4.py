"""Cluster environments that differ from sound ones in one defect each."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

from sound_components import TABLES, AcmeEnvironment
from zoo import caught_by

from torchhal.cluster import LocalEnvironment, TorchElasticEnvironment, port_from_job_id, read_text
from torchhal.cluster._topology import gather_topology
from torchhal.cluster.flux import FluxEnvironment
from torchhal.cluster.lsf import LSFEnvironment
from torchhal.cluster.slurm import SlurmEnvironment


@caught_by("ENV-76")
class DividedNodeEnvironment(TorchElasticEnvironment):
    """It computes the node of any rank from the number of processes on its own node."""

    # "The node's rank or its name; None where this process can't determine it alone."
    # With four processes on one node and two on the next (nodes may differ), the message about missing ranks names a
    # node that is healthy, another one on each rank, and the administrator drains it.

    def node_of(self, rank: int) -> int | str | None:
        return rank // self.local_world_size()


@caught_by("ENV-74")
class ArrayBlindPortEnvironment(LSFEnvironment):
    """It makes the port from the number of the job, which all elements of a job array share."""

    # "Port on which rank 0 listens, from 1 to 65535; the same on all ranks, another one for another job."
    # Two elements of an array whose first ranks share a host want the same port: one of them fails, or its ranks knock
    # at the other's rank 0 until the timeout. Arrays are how sweeps are run.

    def _port(self) -> int:
        return port_from_job_id(read_text("LSB_JOBID"))


@caught_by("ENV-79")
class NaiveNodelistEnvironment(SlurmEnvironment):
    """It reads the first host of a list as if a name had one pair of brackets, at its end."""

    # "Host on which rank 0 listens; the same on all ranks."
    # On a cluster whose hosts are "rack[1-2]n[01-16]" rank 0 is looked for on "rack1", which doesn't exist: every job
    # there is refused with a contradiction that isn't the user's, or waits until the timeout.

    def _address(self) -> str:
        if os.environ.get("SLURM_DISTRIBUTION", "").strip().startswith("arbitrary"):
            return super()._address()
        first = re.split(r",(?![^\[]*\])", read_text("SLURM_STEP_NODELIST"))[0]
        return re.sub(r"\[(\d+).*", r"\1", first)


@caught_by("ENV-78", tables=TABLES)
class UnmountedSpoolEnvironment(AcmeEnvironment):
    """Its request for another start raises where the scheduler's spool folder isn't mounted."""

    # "Called on rank 0 when a signal has stopped a fit that has saved its state, while the other ranks wait for its
    # return. Never raises."
    # On a node without the mount an orderly stop, whose state is saved, ends as a crash with a FileNotFoundError and
    # another exit status, so the job isn't taken up again.

    name: ClassVar[str] = "unmounted_spool"

    def run_again(self, signum: int, *, continues: bool) -> str:
        spool = os.environ.get("ACME_SPOOL", "").strip()
        if not spool or not continues or signum not in self.stop_signals:
            return ""
        Path(spool, f"{self.job_id()}.requeue").touch()
        return f"job {self.job_id()} is requeued"


@caught_by("ENV-52")
class FixedPatienceEnvironment(FluxEnvironment):
    """It waits for the other ranks for ten minutes, whatever time it is given."""

    # "`timeout`: the longest wait for the other ranks."
    # Where nodes boot for half an hour, a timeout of an hour is of no use, and the job fails after ten minutes; one of
    # thirty seconds, so that a broken node is noticed, keeps the whole allocation idle for ten minutes.

    def join(self, timeout: timedelta) -> None:
        if self._place is None and not self._says_place():
            self._place = gather_topology(self)


@caught_by("ENV-80")
class LeftInterfaceEnvironment(LocalEnvironment):
    """For one node it binds gloo to the loopback interface by a variable, which it never takes back."""

    # "Restore what this object changed, and only that."
    # After a fit on one node everything that the program starts inherits the variable: the next job on several nodes,
    # or a process group of the user's own, listens where no other host can reach it, and hangs.

    def configure(self, num_nodes: int, local_world_size: int) -> None:
        super().configure(num_nodes, local_world_size)
        if num_nodes == 1 and os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name without an address would fail
