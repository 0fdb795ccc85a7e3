"""LSF with jsrun, as on Summit and its like."""

from __future__ import annotations

from typing import ClassVar

from torchhal.cluster._env_vars import given, read_int, read_text
from torchhal.cluster._external import ExternalEnvironment
from torchhal.cluster._topology import port_from_job_id
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError


class LSFEnvironment(ExternalEnvironment):
    """A process started by ``jsrun``. Without jsrun, ``bsub python`` starts one process and no ranks.

    Source: the variables of IBM Job Step Manager, and LSB_DJOB_RANKFILE of IBM Spectrum LSF, whose first line is the
    launch node.
    """

    name: ClassVar[str] = "lsf"
    priority: ClassVar[int] = 78
    launcher: ClassVar[str] = "jsrun"

    @classmethod
    def detect(cls) -> bool:
        if launched_by() is not None or given("JSM_NAMESPACE_SIZE") == "1":
            return False
        return bool(given("JSM_NAMESPACE_RANK") or given("JSM_NAMESPACE_SIZE"))

    def world_size(self) -> int:
        return read_int("JSM_NAMESPACE_SIZE", 1)

    def global_rank(self) -> int:
        return read_int("JSM_NAMESPACE_RANK", 0)

    def local_rank(self) -> int:
        return read_int("JSM_NAMESPACE_LOCAL_RANK", 0)

    def local_world_size(self) -> int:
        return read_int("JSM_NAMESPACE_LOCAL_SIZE", 1)

    def _address(self) -> str:
        path = read_text("LSB_DJOB_RANKFILE", hint="it lists the hosts; or set MASTER_ADDR to rank 0's")
        try:
            with open(path) as file:
                hosts = list(dict.fromkeys(line.strip() for line in file if line.strip()))
        except OSError as error:
            raise ConfigurationError(
                f"LSB_DJOB_RANKFILE can't be read ({path}: {error.strerror}): set MASTER_ADDR to rank 0's host"
            ) from error
        if not hosts:
            raise ConfigurationError(f"LSB_DJOB_RANKFILE is empty ({path}): set MASTER_ADDR to rank 0's host")
        return hosts[1] if len(hosts) > 1 else hosts[0]  # the first is the launch node, not a rank

    def job_id(self) -> str:
        return f"LSF's job {_job()}" if given("LSB_JOBID") else ""

    def _port(self) -> int:
        read_text("LSB_JOBID")
        return port_from_job_id(_job())


def _job() -> str:
    """Return the job as LSF writes it: the elements of an array have one number, and an index each."""
    job, index = given("LSB_JOBID"), given("LSB_JOBINDEX")
    return job if index in ("", "0") else f"{job}[{index}]"
