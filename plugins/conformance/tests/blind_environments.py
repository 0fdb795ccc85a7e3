"""Cluster environments of one defect each, written from the contract by somebody who had read no check."""

import os
import socket

from sound_components import TABLES, AcmeEnvironment
from zoo import caught_by

from torchhal.cluster import read_int
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError


@caught_by("ENV-70", tables=TABLES)
class NodeFromRank(AcmeEnvironment):
    """Computes the node from the rank and the number of processes on this node, as if all nodes had as many."""

    # cluster-environment.md, node_rank: "Return this node's rank among all nodes, from 0."; local_world_size: "Return
    # the number of processes on this node; nodes may differ."
    # On nodes of 3 and 1 processes the second node is silently node 3.
    name = "node_from_rank"

    def node_rank(self):
        return self.global_rank() // self.local_world_size()


@caught_by("ENV-16", tables=TABLES)
class KeepsItsRank(AcmeEnvironment):
    """Reads the rank once and keeps it in the object, which a copy in another process brings along."""

    # cluster-environment.md: "values are read when requested, so an unpickled copy in another process answers for that
    # process"
    # Each worker silently takes itself for the rank that pickled the object.
    name = "keeps_its_rank"
    _rank = None

    def global_rank(self):
        if self._rank is None:
            self._rank = super().global_rank()
        return self._rank


@caught_by("ENV-71", tables=TABLES)
class DetectsTheShell(AcmeEnvironment):
    """Is detected by the job's number, which an interactive shell of the job has too."""

    # cluster-environment.md, detect: "False in a shell or notebook inside of an allocation"
    # A notebook in an allocation fails for the variables of a task that it hasn't.
    name = "detects_the_shell"

    @classmethod
    def detect(cls):
        return launched_by() is None and bool(os.environ.get("ACME_JOB_ID", "").strip())


@caught_by("ENV-07", tables=TABLES)
class OnePort(AcmeEnvironment):
    """Meets at one port, whichever the job."""

    # cluster-environment.md, main_port: "the same on all ranks, another one for another job."
    # Two jobs on a host silently meet as one, or not at all.
    name = "one_port"

    @property
    def main_port(self):
        return 29500


@caught_by("ENV-73", tables=TABLES)
class TeardownUnsets(AcmeEnvironment):
    """Removes MASTER_ADDR and MASTER_PORT at the end, in case that something of the run has set them."""

    # cluster-environment.md, teardown: "Restore what this object changed, and only that."
    # What the user has set is silently gone for the second fit.
    name = "teardown_unsets"

    def teardown(self):
        os.environ.pop("MASTER_ADDR", None)
        os.environ.pop("MASTER_PORT", None)


@caught_by("ENV-06", tables=TABLES)
class DefaultLocalRank(AcmeEnvironment):
    """Takes 0 for a local rank that isn't set."""

    # cluster-environment.md: "A missing or garbled variable raises ConfigurationError naming it."
    # All processes of a node silently use its first device.
    name = "default_local_rank"

    def local_rank(self):
        return super().local_rank() if os.environ.get("ACME_LOCAL_TASK") else 0


@caught_by("ENV-11", tables=TABLES)
class ComparesTheProduct(AcmeEnvironment):
    """Compares the number of all processes only: two nodes of two are accepted as one of four."""

    # cluster-environment.md, validate_settings: "Raise an error when the job has another size than the user
    # requested."; "ConfigurationError: they differ; the message shows both numbers."
    # The user's one node of four devices is silently two of two.
    name = "compares_the_product"

    def validate_settings(self, *, num_devices, num_nodes):
        super().validate_settings(num_devices=self.local_world_size(), num_nodes=self.num_nodes())
        if self.world_size() != num_devices * num_nodes:
            raise ConfigurationError(
                f"acme-run started {self.world_size()} processes ({self.local_world_size()} on this node, "
                f"{self.num_nodes()} node(s)), and the Trainer asks for {num_devices * num_nodes} ({num_devices} on "
                f"each of {num_nodes})"
            )


@caught_by("ENV-72", tables=TABLES)
class OwnHostname(AcmeEnvironment):
    """Gives the host of this process as the address of rank 0, which is right on one machine."""

    # cluster-environment.md, main_address: "Host on which rank 0 listens; the same on all ranks."
    # The ranks of the second node wait for a rank 0 on their own host.
    name = "own_hostname"

    @property
    def main_address(self):
        read_int("ACME_TASKS", 1)
        return super().main_address and socket.gethostname()


@caught_by("ENV-72", tables=TABLES)
class OwnNodename(OwnHostname):
    """OwnHostname without a call of the module socket, which ENV-17 counts as resolving a name."""

    name = "own_nodename"

    @property
    def main_address(self):
        return AcmeEnvironment.main_address.fget(self) and os.uname().nodename
