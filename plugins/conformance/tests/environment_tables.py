"""Variables of a job of two nodes of two processes each, whose launcher sets nothing of its own."""

# With the variables that a job may set for it, a process knows by itself what the ranks of these launchers exchange
# otherwise. Real jobs: tests/test_clusters.py.
NODES = tuple(
    {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "NODE_RANK": str(node), "NNODES": "2"} for node in (0, 0, 1, 1)
)
ENV = tuple(
    {**nodes, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    for rank, nodes in enumerate(NODES)
)
