"""What the conformance kit asks of the strategy, and of the environment in jobs of one host and of several."""

import pytest

from torchhal_conformance import conformance_suite


def job(*sizes):
    """The variables that horovodrun sets on hosts with so many processes each."""
    return [
        {
            "HOROVOD_HOSTNAME": f"host-{node}", "HOROVOD_RANK": str(sum(sizes[:node]) + local),
            "HOROVOD_SIZE": str(sum(sizes)), "HOROVOD_LOCAL_RANK": str(local), "HOROVOD_LOCAL_SIZE": str(size),
            "HOROVOD_CROSS_RANK": str(sum(other > local for other in sizes[:node])),
            "HOROVOD_CROSS_SIZE": str(sum(other > local for other in sizes)),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "40123",
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "eth0",
            # what rank 0 leaves with horovodrun's server is tested with a server, in test_processes.py
            **({} if len(sizes) == 1 else {"MASTER_ADDR": "10.0.0.1"}),
        }
        for node, size in enumerate(sizes)
        for local in range(size)
    ]  # fmt: skip


TABLES = {"4": job(4), "2+2": job(2, 2), "1+1+1": job(1, 1, 1), "2+1": job(2, 1)}

TestEnvironment = pytest.mark.slow(conformance_suite("cluster_environment", "horovod", tables=TABLES))
TestStrategy = pytest.mark.usefixtures("horovod")(
    pytest.mark.slow(conformance_suite("strategy", "horovod", features={"groups", "portable", "sync_grads"}))
)
TestCompressed = pytest.mark.usefixtures("horovod")(
    pytest.mark.slow(
        conformance_suite(
            "strategy",
            "horovod",
            arguments={"compression": "fp16"},
            only={"STR-14", "STR-20", "STR-36", "STR-70"},
        )
    )
)
