"""Test modules import what lies beside them, and those of clusters share a fixture."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from cluster_hosts import needs


@pytest.fixture
def slurm(cluster):
    """The file's own ``cluster``, where Slurm is installed."""
    needs("slurmctld", "slurmd", "srun")
    return cluster
