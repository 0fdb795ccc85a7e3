"""Flux: the tasks of a job that ``flux run`` or ``flux submit`` started."""

from __future__ import annotations

from typing import ClassVar

from torchhal.cluster._env_vars import given, read_int, read_text
from torchhal.cluster._external import ExternalEnvironment
from torchhal.cluster._topology import port_from_job_id
from torchhal.distributed.process import launched_by


class FluxEnvironment(ExternalEnvironment):
    """A task of a Flux job.

    Several nodes need MASTER_ADDR. The ranks determine by communicating which of them share a host, since tasks may be
    mapped to hosts in any order.
    """

    name: ClassVar[str] = "flux"
    priority: ClassVar[int] = 76
    launcher: ClassVar[str] = "flux run"

    @classmethod
    def detect(cls) -> bool:
        if launched_by() is not None or given("FLUX_JOB_SIZE") == "1":
            return False
        return bool(given("FLUX_TASK_RANK"))

    def world_size(self) -> int:
        return read_int("FLUX_JOB_SIZE", 1)

    def global_rank(self) -> int:
        return read_int("FLUX_TASK_RANK", 0)

    def local_rank(self) -> int:
        return read_int("FLUX_TASK_LOCAL_ID", 0)

    def num_nodes(self) -> int:
        return read_int("FLUX_JOB_NNODES", 1)

    def node_rank(self) -> int:
        return 0 if self.num_nodes() == 1 else super().node_rank()

    def local_world_size(self) -> int:
        return self.world_size() if self.num_nodes() == 1 else super().local_world_size()

    def _address(self) -> str:
        return "127.0.0.1" if self.num_nodes() == 1 else super()._address()

    def _port(self) -> int:
        return port_from_job_id(read_text("FLUX_JOB_ID"))  # not a number

    def job_id(self) -> str:
        return f"Flux's job {given('FLUX_JOB_ID')}" if given("FLUX_JOB_ID") else ""

    def _no_address(self) -> str:
        return "rank 0's host, the first that 'flux hostlist local' prints"
