"""The conformance checks, in worlds of 2 and 3 processes."""

import pytest

from torchhal_conformance import conformance_suite

APART = "each rank writes its part of a tensor, so tensors that share memory come back apart"
NOT_CUT = "the kit's model is one layer, which can't be cut into stages"
NOT_IN_PLAN = "the kit's model has none of the layers that the plan names"
ONE_NODE = "ddp2 has one process per node, and the kit's processes are on one"

TestZeRO1 = pytest.mark.slow(conformance_suite("strategy", "zero1"))
TestZeRO2 = pytest.mark.slow(conformance_suite("strategy", "zero2"))
TestZeRO3 = pytest.mark.slow(conformance_suite("strategy", "zero3"))
TestHybrid = pytest.mark.slow(conformance_suite("strategy", "hybrid"))  # its data axis takes what ranks there are
TestTensorParallel = pytest.mark.slow(
    conformance_suite(
        "strategy",
        "hybrid",
        arguments={"data": 1, "tensor": 2, "plan": {"body.0": "colwise", "body.2": "rowwise"}},
        expected_failures={
            **dict.fromkeys(("STR-19", "STR-29", "STR-31", "STR-32", "STR-40", "STR-41"), NOT_IN_PLAN),
            **dict.fromkeys(("SYS-02", "SYS-03", "SYS-05"), NOT_IN_PLAN),  # in the world of two: it refuses that of one
        },
    )
)
TestPipeline = pytest.mark.slow(
    conformance_suite(
        "strategy",
        "pipeline",
        expected_failures=dict.fromkeys(
            ("STR-29", "STR-31", "STR-32", "STR-40", "SYS-02", "SYS-03", "SYS-05"), NOT_CUT
        ),
    )
)
TestDP = conformance_suite("strategy", "dp")
TestDDP2 = pytest.mark.slow(
    conformance_suite(
        "strategy",
        "ddp2",
        expected_failures=dict.fromkeys(("STR-19", "STR-38", "STR-40", "SYS-02", "SYS-03", "SYS-05"), ONE_NODE),
    )
)
TestDCP = pytest.mark.slow(conformance_suite("checkpoint_io", "dcp", expected_failures={"CIO-02": APART}))
TestDCPAsync = pytest.mark.slow(conformance_suite("checkpoint_io", "dcp_async", expected_failures={"CIO-02": APART}))
TestAsync = pytest.mark.slow(conformance_suite("checkpoint_io", "async"))
