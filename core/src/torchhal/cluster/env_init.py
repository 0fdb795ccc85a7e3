"""torch's own contract, ``env://``: five variables that are set for every process."""

from __future__ import annotations

from typing import ClassVar

from torchhal.cluster._env_vars import given, read_int
from torchhal.cluster._external import ExternalEnvironment
from torchhal.cluster.kubeflow import KubeflowEnvironment
from torchhal.distributed.process import launched_by

_SEVERAL = "RANK and WORLD_SIZE are, and say that this process is one of several"


class EnvVarEnvironment(ExternalEnvironment):
    """Processes with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Examples are Azure ML, a launcher of your own, a shell loop. RANK and a WORLD_SIZE above one are taken for this
    contract, whose other variables then have to be there: LOCAL_RANK, too, which torch's ``init_process_group`` doesn't
    need. MASTER_ADDR and MASTER_PORT alone are not enough (other tools set them for a single process), nor is a world
    of one. LOCAL_WORLD_SIZE is read where it is set; else the ranks determine it by communicating.
    """

    name: ClassVar[str] = "env"
    priority: ClassVar[int] = 40
    launcher: ClassVar[str] = "what set RANK and WORLD_SIZE"

    @classmethod
    def detect(cls) -> bool:
        if launched_by() is not None or given("TORCHELASTIC_RUN_ID") or given("WORLD_SIZE") == "1":
            return False
        several = bool(given("RANK") and given("WORLD_SIZE"))
        return several and (bool(given("LOCAL_RANK")) or not KubeflowEnvironment.detect())

    def world_size(self) -> int:
        return read_int("WORLD_SIZE", 1)

    def global_rank(self) -> int:
        return read_int("RANK", 0)

    def local_rank(self) -> int:
        return read_int("LOCAL_RANK", 0, hint=_SEVERAL)

    def local_world_size(self) -> int:
        return read_int("LOCAL_WORLD_SIZE", 1) if given("LOCAL_WORLD_SIZE") else super().local_world_size()

    def num_nodes(self) -> int:
        return 1 if given("LOCAL_WORLD_SIZE") == given("WORLD_SIZE") else super().num_nodes()

    def _no_address(self) -> str:
        return _SEVERAL
