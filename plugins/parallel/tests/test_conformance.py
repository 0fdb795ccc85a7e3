"""The conformance checks, in worlds of 2 and 3 processes."""

import pytest

from torchhal_conformance import conformance_suite

TestZeRO1 = pytest.mark.slow(conformance_suite("strategy", "zero1"))
TestZeRO2 = pytest.mark.slow(conformance_suite("strategy", "zero2"))
TestZeRO3 = pytest.mark.slow(conformance_suite("strategy", "zero3"))
TestHybrid = pytest.mark.slow(conformance_suite("strategy", "hybrid"))  # its data axis takes what ranks there are
TestTensorParallel = pytest.mark.slow(
    conformance_suite(
        "strategy",
        "hybrid",
        arguments={"data": 1, "tensor": 2, "plan": {"body.0": "colwise", "body.2": "rowwise"}},
    )
)
TestHybridShards = pytest.mark.slow(
    conformance_suite(
        "strategy", "hybrid", arguments={"data": 1, "shard": 2}, only={"STR-14", "STR-31", "STR-39", "STR-86", "STR-88"}
    )
)
TestPipeline = pytest.mark.slow(conformance_suite("strategy", "pipeline"))
TestDP = conformance_suite("strategy", "dp")
TestDDP2 = pytest.mark.slow(conformance_suite("strategy", "ddp2"))
TestDCP = pytest.mark.slow(conformance_suite("checkpoint_io", "dcp"))
TestDCPAsync = pytest.mark.slow(conformance_suite("checkpoint_io", "dcp_async"))
TestAsync = pytest.mark.slow(conformance_suite("checkpoint_io", "async"))
