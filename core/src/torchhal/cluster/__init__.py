"""Cluster environments: what started the processes, and their rendezvous address."""

from torchhal.cluster._env_vars import read_address, read_int, read_port, read_text
from torchhal.cluster._external import ExternalEnvironment
from torchhal.cluster._topology import port_from_job_id
from torchhal.cluster.base import ClusterEnvironment, RanksNotMetError
from torchhal.cluster.local import LocalEnvironment
from torchhal.cluster.torchelastic import TorchElasticEnvironment

__all__ = [
    "ClusterEnvironment",
    "ExternalEnvironment",
    "LocalEnvironment",
    "RanksNotMetError",
    "TorchElasticEnvironment",
    "port_from_job_id",
    "read_address",
    "read_int",
    "read_port",
    "read_text",
]
