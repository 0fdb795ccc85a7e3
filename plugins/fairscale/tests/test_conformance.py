"""What the conformance kit asks of the strategies."""

import pytest

from torchhal_conformance import conformance_suite

FEATURES = {"groups", "portable", "sync_grads"}


def suite(alias, **options):
    return pytest.mark.usefixtures("fairscale")(pytest.mark.slow(conformance_suite("strategy", alias, **options)))


TestOSS = suite("fairscale_oss", features=FEATURES)
TestSDP = suite("fairscale_sdp", features=FEATURES)
TestUnused = suite(
    "fairscale_sdp",
    arguments={"find_unused_parameters": True},
    only={"STR-14", "STR-15", "STR-60", "STR-64", "STR-66", "STR-70", "STR-73"},
)
TestPipe = suite("fairscale_pipe")
