"""Cluster environments: what started the processes, and their rendezvous address."""

from torchhal.cluster._env_vars import read_address, read_int, read_port
from torchhal.cluster._external import ExternalEnvironment
from torchhal.cluster.base import ClusterEnvironment
from torchhal.cluster.local import LocalEnvironment
from torchhal.cluster.torchelastic import TorchElasticEnvironment

__all__ = [
    "ClusterEnvironment",
    "ExternalEnvironment",
    "LocalEnvironment",
    "TorchElasticEnvironment",
    "read_address",
    "read_int",
    "read_port",
]
