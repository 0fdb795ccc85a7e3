"""What the conformance kit asks of the checkpoint IO and of a strategy."""

import pytest

from torchhal_conformance import conformance_suite

TestIO = pytest.mark.slow(
    conformance_suite(
        "checkpoint_io",
        "deepspeed",
        expected_failures={
            "CIO-22": "it is for what DeepSpeed's engine holds, which any number of ranks reads; the check saves "
            "tensors that another strategy has divided, which are refused"
        },
    )
)

TestStage2 = pytest.mark.slow(conformance_suite("strategy", "deepspeed_stage_2"))
