"""Cluster environments: who started the processes and where they meet."""

from torchhal.cluster.base import ClusterEnvironment

__all__ = ["ClusterEnvironment"]
