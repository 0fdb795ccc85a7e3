"""The kit's checks of a cluster environment, with the variables that a worker is started with, and in real workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torchhal.distributed.process import rank_variables
from torchhal_conformance import conformance_suite


def workers(*sizes: int) -> list[dict[str, str]]:
    """Return the variables of the workers on nodes of these sizes."""
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    return [
        {
            **rank_variables(
                launch_id="5d0c", kind="ray", rank=rank, local_rank=local, node_rank=node, world_size=sum(sizes),
                local_world_size=sizes[node], address="10.99.0.101", port=40123,
            ),
            "NNODES": str(len(sizes)), "TORCHHAL_RAY_WORKER": "1", "RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "4711",
        }
        for rank, (node, local) in enumerate(places)
    ]  # fmt: skip


TABLES = {"2+2": workers(2, 2), "1+1+1": workers(1, 1, 1), "4": workers(4), "2+1": workers(2, 1)}
TestRay = conformance_suite("cluster_environment", "ray", tables=TABLES)

REAL = """
from torchhal_conformance import conformance_suite

TestRay = conformance_suite("cluster_environment", "ray", features={"launches"}, only={"ENV-18", "ENV-54"})
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("variables")
def test_real_workers_conform(tmp_path):
    (tmp_path / "test_suite.py").write_text(REAL)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_suite.py"], cwd=tmp_path,
        env=dict(os.environ), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout, done.stdout[-2000:]
