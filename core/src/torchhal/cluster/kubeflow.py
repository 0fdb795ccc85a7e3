"""Kubeflow's PyTorchJob: one process in each pod."""

from __future__ import annotations

from typing import ClassVar

from torchhal.cluster._env_vars import given, read_int
from torchhal.cluster._external import ExternalEnvironment
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError

_TORCHRUN = "start the script with torchrun, which reads the PET_* variables: torchrun train.py"


class KubeflowEnvironment(ExternalEnvironment):
    """A pod whose plain ``python`` is one rank.

    The training operator (v1) sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and no LOCAL_RANK.

    With several processes a pod, and under Kubeflow Trainer (v2), which sets PET_* only, the operator leaves the
    ranks to torchrun: an error is raised.
    """

    name: ClassVar[str] = "kubeflow"
    priority: ClassVar[int] = 55
    launcher: ClassVar[str] = "Kubeflow's operator"

    @classmethod
    def detect(cls) -> bool:
        if launched_by() is not None or given("LOCAL_RANK") or given("TORCHELASTIC_RUN_ID"):
            return False
        if given("PET_NNODES") and (given("PET_NODE_RANK") or given("RANK")):
            several = given("PET_NNODES") != "1" or given("PET_NPROC_PER_NODE") not in ("", "1", "auto")
            return several or given("WORLD_SIZE") not in ("", "1")
        in_kubernetes = given("KUBERNETES_PORT") or given("KUBERNETES_SERVICE_HOST")
        ranks = given("RANK") and given("WORLD_SIZE") not in ("", "1")
        return bool(in_kubernetes and ranks and given("MASTER_ADDR"))

    def world_size(self) -> int:
        if not given("WORLD_SIZE") and given("PET_NNODES"):
            raise ConfigurationError(
                f"this pod is one of PET_NNODES={given('PET_NNODES')}, but WORLD_SIZE isn't set, nor RANK: {_TORCHRUN}"
            )
        world = read_int("WORLD_SIZE", 1)
        for name in ("PET_NPROC_PER_NODE", "NPROC_PER_NODE"):
            if given(name) not in ("", "1", "auto"):
                raise ConfigurationError(
                    f"{name}={given(name)} asks for several processes in each pod, and RANK={given('RANK')} is the "
                    f"pod's: {_TORCHRUN}"
                )
        if given("PET_NNODES").isdigit() and read_int("PET_NNODES", 1) != world:
            raise ConfigurationError(
                f"WORLD_SIZE={world} processes on PET_NNODES={given('PET_NNODES')} pods are several in each, and "
                f"RANK={given('RANK')} is the pod's: {_TORCHRUN}"
            )
        return world

    def global_rank(self) -> int:
        return read_int("RANK", 0)

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.global_rank()

    def local_world_size(self) -> int:
        return 1

    def num_nodes(self) -> int:
        return self.world_size()
