"""What the conformance kit asks of a strategy: of a replica group that is alone, and of one that another one joins."""

import pytest
from lighthouses import lighthouse

from torchhal_conformance import conformance_suite


@pytest.fixture(autouse=True, scope="module")
def address():
    """Each check is a run of its own: one that has ended must not count as there for long."""
    with pytest.MonkeyPatch.context() as patch, lighthouse(join_timeout_ms=250, heartbeat_timeout_ms=250) as address:
        patch.setenv("TORCHFT_LIGHTHOUSE", address)
        yield


TestTorchFT = pytest.mark.slow(conformance_suite("strategy", "torchft", features={"elastic"}))
