"""torchrun (torch's elastic launcher): the processes exist, and their variables provide every number."""

from __future__ import annotations

import os
import re
from typing import ClassVar

from torchhal.cluster._env_vars import given, read_address, read_int, read_port
from torchhal.cluster.base import ClusterEnvironment
from torchhal.errors import ConfigurationError

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""``1`` in torchrun's environment: each round of its rendezvous publishes a new address for the workers."""


class TorchElasticEnvironment(ClusterEnvironment):
    """A process started by ``torchrun`` or ``python -m torch.distributed.run``.

    Nodes may differ in size, so every number is taken as torchrun gives it and none is computed from another.
    """

    name: ClassVar[str] = "torchelastic"
    priority: ClassVar[int] = 80

    @classmethod
    def detect(cls) -> bool:
        return bool(os.environ.get("TORCHELASTIC_RUN_ID"))

    @classmethod
    def recommendations(cls) -> list[str]:
        """Return the advice to give each of torchrun's agents its own store, where nodes may join.

        With a store that rounds share, the agent of rank 0's node publishes its address in its own first round only: a
        node that joins later waits for it until the old one ends with a DistStoreError. No worker runs at that
        time that could report it.
        """
        if given(OWN_STORES) == "1" or (cls.detect() and not _nodes_may_change()):
            return []
        return [
            f"torchrun --nnodes MIN:MAX: export {OWN_STORES}=1 on every node before it; else a node that joins the job "
            "waits in vain, and the job ends a minute later (torch 2.13)"
        ]

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return read_int("WORLD_SIZE", 1)

    def global_rank(self) -> int:
        return read_int("RANK", 0)

    def local_rank(self) -> int:
        return read_int("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        return read_int("GROUP_RANK", 0)

    def local_world_size(self) -> int:
        return read_int("LOCAL_WORLD_SIZE", 1)

    def num_nodes(self) -> int:
        return read_int("GROUP_WORLD_SIZE", 1)

    @property
    def main_address(self) -> str:
        return read_address("MASTER_ADDR")

    @property
    def main_port(self) -> int:
        return read_port("MASTER_PORT")

    def job_id(self) -> str:
        return f"torchrun's run {given('TORCHELASTIC_RUN_ID')}"

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        local, nodes, world = self.local_world_size(), self.num_nodes(), self.world_size()
        rank, local_rank = self.global_rank(), self.local_rank()
        if rank >= world or local_rank >= local:
            raise ConfigurationError(
                f"torchrun's variables contradict each other: RANK={rank} of WORLD_SIZE={world}, "
                f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local}"
            )
        if local != num_devices:
            raise ConfigurationError(
                f"torchrun started {local} process(es) on this node (--nproc-per-node), but {num_devices} device(s) "
                "are asked for: make both the same, or say devices='auto'"
            )
        if nodes != num_nodes:
            raise ConfigurationError(
                f"torchrun started {nodes} node(s) (--nnodes), but {num_nodes} node(s) are asked for (num_nodes): "
                "make both the same, or say num_nodes='auto'"
            )


def _nodes_may_change() -> bool:
    """Return whether torchrun was given ``--nnodes MIN:MAX``, in its variable or on its command line.

    The latter only if it can be read.
    """
    if ":" in given("PET_NNODES"):
        return True
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            command = file.read().decode(errors="replace")
    except OSError:
        return False
    return re.search(r"--nnodes[=\0]\d+:\d+\0", command) is not None
