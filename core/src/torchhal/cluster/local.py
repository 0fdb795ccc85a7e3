"""Provide the environment in which torchhal starts the processes itself, on this machine or several started by hand."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from torchhal.cluster._env_vars import given, read_address, read_int, read_port
from torchhal.cluster.base import ClusterEnvironment
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError

_BY_HAND = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_SOMEBODY_ELSES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


class LocalEnvironment(ClusterEnvironment):
    """Processes that torchhal starts.

    Its state, determined whenever a value is read, is one of three:

    * in a process that a torchhal launcher started: the launcher's variables, detected by TORCHHAL_LAUNCH_ID;
    * in the process that launches and is local rank 0 itself: the values of :meth:`configure`, from
      :meth:`set_rendezvous` on;
    * before a launch: rank 0 of 1.

    Several nodes by hand: start the script on each with NODE_RANK, MASTER_ADDR and MASTER_PORT set, and pass
    ``num_nodes``. Other variables left over in a shell (RANK, WORLD_SIZE) are ignored.
    """

    name: ClassVar[str] = "local"
    priority: ClassVar[int] = 0

    def __init__(self) -> None:
        self._num_nodes = 1
        self._local_world_size = 1
        self._rendezvous: tuple[str, int] | None = None

    @classmethod
    def detect(cls) -> bool:
        if launched_by() is not None:
            return True
        # With RANK or WORLD_SIZE set too they are the complete set of another launcher (env://, a cloud's).
        return all(os.environ.get(name) for name in _BY_HAND) and not any(os.environ.get(n) for n in _SOMEBODY_ELSES)

    @property
    def creates_processes_externally(self) -> bool:
        return False

    def configure(self, num_nodes: int, local_world_size: int) -> None:
        """Receive the numbers that the strategy was configured for, before the launch. The same on every node.

        Raises:
            ConfigurationError: in a process that was launched with other numbers, showing both; or for several
                nodes without NODE_RANK, MASTER_ADDR, MASTER_PORT.
        """
        for name, value in (("num_nodes", num_nodes), ("local_world_size", local_world_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"'{name}' must be an int of at least 1 (got {value!r})")
        self.validate_settings(num_devices=local_world_size, num_nodes=num_nodes)
        self._num_nodes = num_nodes
        self._local_world_size = local_world_size
        if num_nodes > 1:
            self.read_node_rank()
            self.read_rendezvous()

    def set_rendezvous(self, address: str, port: int) -> None:
        """Receive the address from the launcher in its own process when that is a rank: from now on the job exists."""
        self._rendezvous = (address, port)

    def world_size(self) -> int:
        if self._launched():
            return read_int("WORLD_SIZE", 1)
        # On several nodes the other processes exist, launched here or not; on one node there are none yet.
        if self._rendezvous is not None or self._num_nodes > 1:
            return self._num_nodes * self._local_world_size
        return 1

    def global_rank(self) -> int:
        if self._launched():
            return read_int("RANK", 0)
        return self.node_rank() * self._local_world_size

    def local_rank(self) -> int:
        return read_int("LOCAL_RANK", 0) if self._launched() else 0

    def node_rank(self) -> int:
        if self._launched():
            return read_int("NODE_RANK", 0)
        return self.read_node_rank() if self._num_nodes > 1 else 0

    def local_world_size(self) -> int:
        if self._launched():
            return read_int("LOCAL_WORLD_SIZE", 1)
        return self._local_world_size if self.world_size() > 1 else 1

    def num_nodes(self) -> int:
        if self._launched() or self._num_nodes > 1:
            return super().num_nodes()
        if not LocalEnvironment.detect():
            return 1
        hint = f"{', '.join(_BY_HAND)} say that this is one of several nodes; or say 'num_nodes'"
        return read_int("NNODES", 1, hint=hint)

    def node_of(self, rank: int) -> int | None:
        local_world_size = self.local_world_size()
        return rank // local_world_size if self.world_size() > local_world_size else None

    @property
    def main_address(self) -> str:
        if self._launched():
            return read_address("MASTER_ADDR")
        if self._rendezvous is not None:
            return self._rendezvous[0]
        return self.read_rendezvous()[0] if self._num_nodes > 1 else "127.0.0.1"

    @property
    def main_port(self) -> int:
        if self._launched():
            return read_port("MASTER_PORT")
        if self._rendezvous is None and self._num_nodes > 1:
            return self.read_rendezvous()[1]
        if self._rendezvous is None:
            # No process has to connect yet, and a port without a listener would be misleading.
            raise ConfigurationError("'main_port' is known after the launch: the system chooses a free one")
        return self._rendezvous[1]

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        if not self._launched():
            if num_nodes == 1 and LocalEnvironment.detect() and read_int("NODE_RANK", 0) > 0:
                raise ConfigurationError(
                    f"NODE_RANK={given('NODE_RANK')} says that this is one of several nodes, with MASTER_ADDR and "
                    "MASTER_PORT where they meet, but one node is asked for, which would train by itself: say "
                    "'num_nodes', or unset NODE_RANK"
                )
            return
        local, world = read_int("LOCAL_WORLD_SIZE", 1), read_int("WORLD_SIZE", 1)
        rank, local_rank = self.global_rank(), self.local_rank()
        if rank >= world or local_rank >= local:
            raise ConfigurationError(
                f"the launcher's variables contradict each other: RANK={rank} of WORLD_SIZE={world}, "
                f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local}"
            )
        if local != num_devices or world != num_devices * num_nodes:
            raise ConfigurationError(
                f"this process was launched as one of {local} on its node and {world} in all, but {num_devices} "
                f"device(s) on {num_nodes} node(s) are asked for ({num_devices * num_nodes} processes). Every process "
                "must ask for the same number; a job keeps the number of processes it was launched with."
            )

    def teardown(self) -> None:
        """Keep everything: the processes outlive a run, and the next one, or a save after it, uses them again."""

    def __getstate__(self) -> dict[str, Any]:
        # This object's state belongs to this process: a copy in another one reads its own variables.
        return {**self.__dict__, "_rendezvous": None}

    def _launched(self) -> bool:
        return launched_by() is not None

    def read_rendezvous(self) -> tuple[str, int]:
        """Return the address and the port at which several nodes meet, before a launch.

        MASTER_ADDR and MASTER_PORT; an environment in which they are recorded elsewhere overrides this and
        :meth:`read_node_rank`.

        Raises:
            ConfigurationError: they are missing, or no address and port.
        """
        return read_address("MASTER_ADDR"), read_port("MASTER_PORT")

    def read_node_rank(self) -> int:
        """Return the number of this node among several, before a launch: NODE_RANK.

        Raises:
            ConfigurationError: it is missing, or not below the number of nodes.
        """
        node_rank = read_int("NODE_RANK", 0, hint=_how_to_start_nodes())
        if node_rank >= self._num_nodes:
            raise ConfigurationError(f"NODE_RANK must be below 'num_nodes' ({self._num_nodes}) (got {node_rank})")
        return node_rank


def _how_to_start_nodes() -> str:
    if given("SLURM_JOB_ID"):
        return "in this allocation of Slurm's start the script with srun, which starts it on every node"
    return "with 'num_nodes' above 1 start the script on every node with it set"
