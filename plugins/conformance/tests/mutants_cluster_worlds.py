"""Cluster environments that are each broken in one way: in other layouts, when ranks meet, in real processes."""

import json
import os
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta

from zoo import caught_by

from torchhal.cluster import ClusterEnvironment, TorchElasticEnvironment
from torchhal.cluster.mpi import OpenMPIEnvironment
from torchhal.errors import ConfigurationError, DistributedError
from torchhal_conformance._limits import scaled


@caught_by("ENV-50", says="of a job of 1+1+1")
class HalfOfTheRanks(TorchElasticEnvironment):
    """Right on two nodes only."""

    def node_rank(self):
        return 2 * self.global_rank() // self.world_size()


@caught_by("ENV-50", says="num_nodes() must be 3")
class AlwaysTwoNodes(TorchElasticEnvironment):
    def num_nodes(self):
        return 2

    def validate_settings(self, *, num_devices, num_nodes):
        if num_nodes == 5 or num_devices != self.local_world_size():
            super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)


@caught_by("ENV-51", says="of another rank's copy")
class CopiesKeepTheirPlace(OpenMPIEnvironment):
    """Its pickled state holds what the ranks have exchanged."""

    def __getstate__(self):
        return dict(self.__dict__)


@caught_by("ENV-51", says="wrote NODE_RANK")
class ExportsItsPlace(OpenMPIEnvironment):
    def join(self, timeout):
        super().join(timeout)
        os.environ["NODE_RANK"] = str(self.node_rank())


@caught_by("ENV-51", says="after join()")
class CountsNodesFromOne(OpenMPIEnvironment):
    def node_rank(self):
        return super().node_rank() + (self._place is not None)


@caught_by("ENV-52", says="with a timeout of")
class WaitsItsOwnTime(OpenMPIEnvironment):
    def join(self, timeout):
        super().join(timeout + timedelta(seconds=scaled(5) + 1))


@caught_by("ENV-52", says="though the last rank never came")
class GoesOnWithout(OpenMPIEnvironment):
    """Takes each rank for alone on its node where some are missing."""

    def join(self, timeout):
        with suppress(DistributedError):
            super().join(timeout)


class FromARuntime(ClusterEnvironment):
    """Sound: asks the process that has started it, and reads no variable."""

    name = "from_a_runtime"
    features = frozenset({"live_runtime"})
    creates_processes_externally = True

    @staticmethod
    def answers():
        try:
            with open(os.path.join(tempfile.gettempdir(), f"torchhal-test-runtime-{os.getppid()}")) as file:
                return json.load(file)[str(os.getpid())]
        except (OSError, KeyError):
            return None

    @classmethod
    def detect(cls):
        return cls.answers() is not None

    def number(self, name):
        found = self.answers()
        if found is None:
            raise ConfigurationError("no runtime has started this process")
        return found[name]

    def world_size(self):
        return self.number("size")

    def global_rank(self):
        return self.number("rank")

    def local_rank(self):
        return self.number("rank")

    def node_rank(self):
        return 0

    def local_world_size(self):
        return self.number("size")

    main_address = "127.0.0.1"

    @property
    def main_port(self):
        return self.number("port")

    def validate_settings(self, *, num_devices, num_nodes):
        if (num_devices, num_nodes) != (self.world_size(), 1):
            raise ConfigurationError(
                f"{self.world_size()} on 1 were started, {num_devices} on {num_nodes} are asked for"
            )


RUNTIME = (sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "runtime_launcher.py"))


@caught_by("ENV-53", launcher=RUNTIME, says="process 1")
class SameRankForAll(FromARuntime):
    def local_rank(self):
        return 0


@caught_by("ENV-53", launcher=RUNTIME, says="copy by pickle")
class CopiesForget(FromARuntime):
    """Its copies are of no job."""

    copied = False

    def __getstate__(self):
        return {"copied": True}

    def world_size(self):
        return 1 if self.copied else super().world_size()


@caught_by("ENV-54", features={"launches"}, says="reading wrote NODE_RANK")
class ExportsInRealProcesses(TorchElasticEnvironment):
    def node_rank(self):
        os.environ["NODE_RANK"] = os.environ["GROUP_RANK"]
        return super().node_rank()
