"""The kit's checks of a cluster environment, with the variables that a worker is started with."""

from __future__ import annotations

from torchhal_conformance import conformance_suite

TABLE = tuple(
    {
        "TORCHHAL_LAUNCH_ID": "5d0c", "TORCHHAL_LAUNCH_KIND": "ray", "RANK": str(rank), "LOCAL_RANK": str(local),
        "NODE_RANK": str(node), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.99.0.101",
        "MASTER_PORT": "40123", "RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "4711",
    }
    for rank, node, local in ((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1))
)  # fmt: skip

TestRay = conformance_suite("cluster_environment", "ray", tables=TABLE)
