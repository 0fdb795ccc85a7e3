"""Cluster environments that are wrong for one process, for nodes started by hand, or about the place of meeting."""

import os

from zoo import caught_by

from torchhal.cluster import LocalEnvironment, TorchElasticEnvironment
from torchhal.cluster._env_vars import read_int
from torchhal.cluster._topology import RankTopology
from torchhal.cluster.base import RanksNotMetError
from torchhal.cluster.env_init import EnvVarEnvironment
from torchhal.errors import ConfigurationError
from torchhal_conformance._launcher_env import TABLES

LOCAL = {"tables": TABLES["local"], "launcher": ()}
ENV = {
    "tables": [
        {
            "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "NODE_RANK": str(rank // 2), "NNODES": "2", "RANK": str(rank),
            "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
        }
        for rank in range(4)
    ]
}  # fmt: skip


@caught_by("ENV-40", says="in a shell", **LOCAL)
class LeavesTheLaunchToNobody(LocalEnvironment):
    """In a shell it waits for processes that nobody starts."""

    creates_processes_externally = True


@caught_by("ENV-40", says="of a copy", **LOCAL)
class CopiesCarryTheRendezvous(LocalEnvironment):
    """A worker that was sent it counts ranks by the numbers of the process that launches."""

    def __getstate__(self):
        return self.__dict__


@caught_by("ENV-41", says="there is no node")
class NoNodeAtAll(TorchElasticEnvironment):
    def num_nodes(self):
        return read_int("GROUP_WORLD_SIZE", 0)


@caught_by("ENV-60")
class SeveralAtLeast(TorchElasticEnvironment):
    """Takes a job for one of several processes."""

    def world_size(self):
        return read_int("WORLD_SIZE", 2)


@caught_by("ENV-60", says="have met", **ENV)
class MeetsNobody(EnvVarEnvironment):
    """The only process of a job waits for the others."""

    def _asked(self):
        if self.world_size() == 1:
            raise RanksNotMetError("which ranks share a host they find out when they meet")
        return super()._asked()


@caught_by("ENV-60", says="must be accepted")
class RefusesLoopback(TorchElasticEnvironment):
    def validate_settings(self, *, num_devices, num_nodes):
        if self.main_address.startswith("127."):
            raise ConfigurationError("MASTER_ADDR must be an address that other hosts reach")
        super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)


@caught_by("ENV-61", says="65536")
class AnyPort(TorchElasticEnvironment):
    @property
    def main_port(self):
        return read_int("MASTER_PORT", 1)


@caught_by("ENV-61", says="65535")
class PortsBelowTheLast(TorchElasticEnvironment):
    @property
    def main_port(self):
        return read_int("MASTER_PORT", 1, 65534)


@caught_by("ENV-61", says="fd00::1")
class KeepsBrackets(TorchElasticEnvironment):
    @property
    def main_address(self):
        return os.environ["MASTER_ADDR"] if os.environ.get("MASTER_ADDR") else super().main_address


@caught_by("ENV-61", says="n1")
class AnotherAddress(TorchElasticEnvironment):
    """The ranks meet at a host of its own choice, the same on all of them."""

    @property
    def main_address(self):
        return f"head-of-{super().main_address}"


@caught_by("ENV-62", says="the numbers of node 1", **LOCAL)
class EachNodeIsTheFirst(LocalEnvironment):
    def global_rank(self):
        return super().global_rank() if self._launched() else 0


@caught_by("ENV-62", says="where the ranks meet", **LOCAL)
class MeetsAtItself(LocalEnvironment):
    @property
    def main_address(self):
        return super().main_address if self._launched() or self._rendezvous else "127.0.0.1"


@caught_by("ENV-62", says="NODE_RANK=1", **LOCAL)
class TrainsByItself(LocalEnvironment):
    def validate_settings(self, *, num_devices, num_nodes):
        if self._launched():
            super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)


@caught_by("ENV-62", says="NODE_RANK='2'", **LOCAL)
class AnyNode(LocalEnvironment):
    def read_node_rank(self):
        return read_int("NODE_RANK", 0)


@caught_by("ENV-63", says="after join()", **ENV)
class NeverMeets(EnvVarEnvironment):
    """Every rank takes itself for the only one of its host, whatever the others have."""

    def join(self, timeout):
        self._place = RankTopology(self.global_rank(), 0, 1, self.world_size())


@caught_by("ENV-64")
class RecommendsNothing(TorchElasticEnvironment):
    @classmethod
    def recommendations(cls):
        return None
