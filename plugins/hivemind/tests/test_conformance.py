"""What the conformance kit asks of a strategy: of a peer that is alone, and of one that another one joins."""

import pytest

from torchhal_conformance import conformance_suite

FAST = {
    "host_addresses": ["/ip4/127.0.0.1/tcp/0"],
    "matchmaking_time": 0.5,
    "request_timeout": 0.2,
    "averaging_timeout": 10.0,
    "refresh_period": 0.1,
    "peer_expiration": 10.0,
}

TestHivemind = pytest.mark.slow(
    conformance_suite("strategy", "hivemind", arguments={**FAST, "target_batch_size": 12})
)  # a kit's batch

# Ten batches to a step: on a busy machine each round of averages takes seconds, and test_peers.py has them.
TestPeers = pytest.mark.slow(
    conformance_suite(
        "strategy", "hivemind", features={"elastic"}, only={"STR-43"}, arguments={**FAST, "target_batch_size": 120}
    )
)
