"""What the conformance kit asks of the strategies."""

import pytest

from torchhal_conformance import conformance_suite

FEATURES = {"groups", "portable", "sync_grads"}
runs = pytest.mark.usefixtures("fairscale")

TestOSS = runs(pytest.mark.slow(conformance_suite("strategy", "fairscale_oss", features=FEATURES)))
TestSDP = runs(pytest.mark.slow(conformance_suite("strategy", "fairscale_sdp", features=FEATURES)))
TestUnused = runs(
    pytest.mark.slow(
        conformance_suite(
            "strategy",
            "fairscale_sdp",
            arguments={"find_unused_parameters": True},
            only={"STR-14", "STR-15", "STR-60", "STR-64", "STR-66", "STR-70", "STR-73"},
        )
    )
)
TestPipe = runs(pytest.mark.slow(conformance_suite("strategy", "fairscale_pipe")))
