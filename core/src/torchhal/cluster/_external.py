"""Provide the base of environments in which an external launcher has started every process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from torchhal.cluster._env_vars import given, read_address, read_int, read_port
from torchhal.cluster._topology import RankTopology, gather_topology, is_loopback
from torchhal.cluster.base import ClusterEnvironment, RanksNotMetError
from torchhal.errors import ConfigurationError


class ExternalEnvironment(ClusterEnvironment):
    """An environment in which every process exists when the script starts.

    The ranks meet at MASTER_ADDR and MASTER_PORT where these are set, otherwise at the subclass's address. If a
    launcher provides no nodes, NODE_RANK and NNODES are read if they are set; else the ranks exchange their hosts,
    once, when a run begins.
    """

    launcher: ClassVar[str]
    """Name of what has started the processes, for messages."""

    def __init__(self) -> None:
        self._place: RankTopology | None = None

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return read_address("MASTER_ADDR") if given("MASTER_ADDR") else self._address()

    @property
    def main_port(self) -> int:
        return read_port("MASTER_PORT") if given("MASTER_PORT") else self._port()

    def _address(self) -> str:
        """Return the host of rank 0, if MASTER_ADDR isn't set."""
        return read_address("MASTER_ADDR", hint=self._no_address())

    def _port(self) -> int:
        """Return a port that is the same on all ranks, if MASTER_PORT isn't set."""
        return read_port("MASTER_PORT", hint=self._no_address())

    def _no_address(self) -> str:
        return f"{self.launcher} doesn't say where rank 0 runs"

    def num_nodes(self) -> int:
        """Return the number of hosts of the job."""
        return read_int("NNODES", 1) if given("NNODES") else self._asked().num_nodes

    def node_rank(self) -> int:
        return read_int("NODE_RANK", 0) if given("NODE_RANK") else self._asked().node_rank

    def local_world_size(self) -> int:
        return self._asked().local_world_size

    def join(self, timeout: timedelta) -> None:
        if self._place is None and not self._says_place():
            self._place = gather_topology(self, timeout)

    def _says_place(self) -> bool:
        """Return whether variables provide this node's rank, the number of nodes, and the node's processes."""
        try:
            self.num_nodes(), self.node_rank(), self.local_world_size()
        except RanksNotMetError:
            return False
        return True

    def _asked(self) -> RankTopology:
        if self._place is None and self.world_size() == 1:
            self._place = RankTopology(0, 0, 1, 1)
        if self._place is None:
            raise RanksNotMetError(
                f"{self.launcher} doesn't say which ranks share a host, which they find out when they meet: ask in "
                "fit, validate, test or predict, or set NODE_RANK and NNODES (and LOCAL_WORLD_SIZE)"
            )
        return self._place

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        # Variables are checked first: the rest may not be known before the ranks have met.
        world, rank, local_rank = self.world_size(), self.global_rank(), self.local_rank()
        if rank >= world or local_rank >= world:
            raise ConfigurationError(
                f"{self.launcher}'s variables contradict each other: rank {rank} of {world}, local rank {local_rank}"
            )
        if num_nodes > 1 and given("MASTER_ADDR") and is_loopback(self.main_address):
            raise ConfigurationError(
                f"MASTER_ADDR must be an address at which all {num_nodes} nodes reach rank 0 (got "
                f"{self.main_address!r}, which every node means itself by)"
            )
        local = self.local_world_size()
        if local_rank >= local or local > world:
            raise ConfigurationError(
                f"{self.launcher}'s variables contradict each other: rank {rank} of {world}, local rank {local_rank} "
                f"of {local}"
            )
        if local != num_devices:
            raise ConfigurationError(
                f"{self.launcher} started {local} process(es) on this node, but {num_devices} device(s) are asked "
                "for: make both the same, or say devices='auto'"
            )
        # Nodes of equal size need no communication with the other ranks.
        nodes = num_nodes if world == local * num_nodes else self.num_nodes()
        if nodes != num_nodes:
            raise ConfigurationError(
                f"{self.launcher} started processes on {nodes} node(s), but {num_nodes} node(s) are asked for "
                "(num_nodes): make both the same, or say num_nodes='auto'"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_place": None}  # a copy in another process determines its own place
