"""What the conformance kit asks of the checkpoint IO and of a strategy."""

import pytest

from torchhal_conformance import conformance_suite

TestIO = pytest.mark.slow(conformance_suite("checkpoint_io", "deepspeed"))
TestStage2 = pytest.mark.slow(conformance_suite("strategy", "deepspeed_stage_2"))
