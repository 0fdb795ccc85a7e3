"""Cluster environments that are each broken in one way: over torchrun's, and over a scheduler's."""

import os
import socket
import threading

from zoo import caught_by

from torchhal.cluster import ClusterEnvironment, TorchElasticEnvironment
from torchhal.cluster._env_vars import read_int
from torchhal.cluster._hostlist import hosts
from torchhal.cluster.base import RanksNotMetError
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError
from torchhal_conformance._launcher_env import TABLES

SLURM = {"tables": TABLES["slurm"]}


class Scheduler(ClusterEnvironment):
    """Sound but for ENV-08: it knows one form of a list of hosts."""

    name = "slurm"
    priority = 60

    @classmethod
    def detect(cls):
        return "SLURM_STEP_ID" in os.environ

    creates_processes_externally = True

    def world_size(self):
        return read_int("SLURM_STEP_NUM_TASKS", 1)

    def global_rank(self):
        return read_int("SLURM_PROCID", 0)

    def local_rank(self):
        return read_int("SLURM_LOCALID", 0)

    def node_rank(self):
        return read_int("SLURM_NODEID", 0)

    def local_world_size(self):
        return int(os.environ["SLURM_STEP_TASKS_PER_NODE"].partition("(")[0])

    @property
    def main_address(self):
        return os.environ["SLURM_STEP_NODELIST"].replace("[", "").split("-")[0]

    @property
    def main_port(self):
        return 15000 + read_int("SLURM_JOB_ID", 0) % 20000


@caught_by("ENV-01")
class AlwaysThere(TorchElasticEnvironment):
    @classmethod
    def detect(cls):
        return True


@caught_by("ENV-01")
class NotABool(TorchElasticEnvironment):
    @classmethod
    def detect(cls):
        return os.environ.get("TORCHELASTIC_RUN_ID")


@caught_by("ENV-02")
class AnyRank(TorchElasticEnvironment):
    @classmethod
    def detect(cls):
        return "RANK" in os.environ


@caught_by("ENV-02")
class NotEverywhere(TorchElasticEnvironment):
    @classmethod
    def detect(cls):
        return super().detect() and os.environ["RANK"] == "0"


@caught_by("ENV-03", "ENV-04")
class LocalForGlobal(TorchElasticEnvironment):
    def global_rank(self):
        return self.local_rank()


@caught_by("ENV-04")
class NoNode(TorchElasticEnvironment):
    def node_rank(self):
        return 0


@caught_by("ENV-05")
class Strings(TorchElasticEnvironment):
    def global_rank(self):
        return os.environ["RANK"]


@caught_by("ENV-06", says="KeyError")
class PlainKeys(TorchElasticEnvironment):
    def global_rank(self):
        return int(os.environ["RANK"])


@caught_by("ENV-06")
class DefaultsToZero(TorchElasticEnvironment):
    def global_rank(self):
        return int(os.environ.get("RANK") or 0) if os.environ.get("RANK", "0").isdigit() else super().global_rank()


@caught_by("ENV-06", says="no such join")
class NothingDeterminesIt(TorchElasticEnvironment):
    def node_rank(self):
        if not os.environ.get("GROUP_RANK"):
            raise RanksNotMetError("which node this is the ranks find out when they meet")
        return super().node_rank()


@caught_by("ENV-06", says="can't meet without")
class MeetsWithoutARank(TorchElasticEnvironment):
    def global_rank(self):
        if not os.environ.get("RANK"):
            raise RanksNotMetError("which rank this is the ranks find out when they meet")
        return super().global_rank()

    def join(self, timeout):
        pass


@caught_by("ENV-07", **SLURM)
class OnePortForAll(Scheduler):
    main_port = 29500


@caught_by("ENV-07", tables=[{**row, "SLURM_JOB_ID": "f38rBqEWT"} for row in TABLES["slurm"]], says="the same port")
class OnePortForJobsWithNames(Scheduler):
    main_port = 29500


@caught_by("ENV-07")
class OwnAddress(TorchElasticEnvironment):
    @property
    def main_address(self):
        return f"n{self.node_rank() + 1}"


@caught_by("ENV-08", **SLURM)
class DashesAreRanges(Scheduler):
    """As the class above: splits at the first dash."""


@caught_by("ENV-08", says="'fd99::[101-102]'", **SLURM)
class NoColons(Scheduler):
    """Knows lists of names only."""

    @property
    def main_address(self):
        return hosts(os.environ["SLURM_STEP_NODELIST"])[0].replace(":", "")


@caught_by("ENV-09")
class LaunchesAgain(TorchElasticEnvironment):
    creates_processes_externally = 1


@caught_by("ENV-09", says="launcher has started all processes")
class StartsThemAgain(TorchElasticEnvironment):
    creates_processes_externally = False

    def configure(self, num_nodes, local_world_size):
        pass


@caught_by("ENV-10")
class Exports(TorchElasticEnvironment):
    def global_rank(self):
        os.environ["NODE_RANK"] = os.environ["GROUP_RANK"]
        return super().global_rank()


@caught_by("ENV-10")
class CleansUp(TorchElasticEnvironment):
    def teardown(self):
        os.environ.pop("WORLD_SIZE", None)


@caught_by("ENV-11")
class AcceptsAll(TorchElasticEnvironment):
    def validate_settings(self, *, num_devices, num_nodes):
        pass


@caught_by("ENV-11")
class ShowsNothing(TorchElasticEnvironment):
    def validate_settings(self, *, num_devices, num_nodes):
        try:
            super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)
        except ConfigurationError:
            raise ConfigurationError("wrong settings") from None


@caught_by("ENV-12", **SLURM)
class SamePriority(Scheduler):
    priority = TorchElasticEnvironment.priority


@caught_by("ENV-13", **SLURM)
class AnyJob(Scheduler):
    @classmethod
    def detect(cls):
        return "SLURM_JOB_ID" in os.environ


@caught_by("ENV-14")
class RankAfterInit(TorchElasticEnvironment):
    def global_rank(self):
        import torch.distributed as dist

        return dist.get_rank() if dist.is_initialized() else 0


@caught_by("ENV-15")
class Overruled(TorchElasticEnvironment):
    meeting = None

    def set_rendezvous(self, address, port):
        self.meeting = address

    def world_size(self):
        return 1 if self.meeting else super().world_size()


@caught_by("ENV-16")
class KeepsItsRank(TorchElasticEnvironment):
    def __init__(self):
        self.rank = read_int("RANK", 0)

    def global_rank(self):
        return self.rank


@caught_by("ENV-16")
class HoldsALock(TorchElasticEnvironment):
    def __init__(self):
        self.lock = threading.Lock()


@caught_by("ENV-17")
class AsksTheNetwork(TorchElasticEnvironment):
    @property
    def main_address(self):
        return socket.getaddrinfo("localhost", 80)[0][4][0]


@caught_by("ENV-20")
class Divides(TorchElasticEnvironment):
    def node_rank(self):
        return self.global_rank() // 2

    def local_rank(self):
        return self.global_rank() % 2

    def local_world_size(self):
        return 2


@caught_by("ENV-20", says="dealt in turn", **SLURM)
class AlwaysPacked(Scheduler):
    """Goes by the sizes of the nodes, as if each were full before the next one gets a rank."""

    def sizes(self):
        return [int(one) for one in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(",")]

    def node_rank(self):
        return 0 if self.global_rank() < self.sizes()[0] else 1

    def local_world_size(self):
        return self.sizes()[self.node_rank()]


SLICES = [
    {"SLICE_RANK": str(rank), "SLICE_NODE": str(rank // 2), "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    for rank in range(4)
]


@caught_by("ENV-12", tables=SLICES, says="of processes that local has started for it")
class IgnoresTorchhalsLaunch(Scheduler):
    """In processes that torchhal has started on a slice its numbers are still those of the slice."""

    name = "slice"
    priority = 1

    @classmethod
    def detect(cls):
        return "SLICE_RANK" in os.environ

    @property
    def creates_processes_externally(self):
        return launched_by() is None

    def world_size(self):
        return 4

    def global_rank(self):
        return read_int("SLICE_RANK", 0)

    def local_rank(self):
        return self.global_rank() % 2

    def node_rank(self):
        return read_int("SLICE_NODE", 0)

    def local_world_size(self):
        return 2
