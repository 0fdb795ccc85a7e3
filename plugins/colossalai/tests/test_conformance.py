"""What the conformance kit asks of the strategies that a CPU can run."""

import pytest

from torchhal_conformance import conformance_suite

FEATURES = {"groups", "portable", "sync_grads"}
runs = pytest.mark.usefixtures("colossalai")

TestDataParallel = runs(pytest.mark.slow(conformance_suite("strategy", "colossalai", features=FEATURES)))
TestStage1 = runs(pytest.mark.slow(conformance_suite("strategy", "colossalai_zero1", features=FEATURES)))
TestStage2 = runs(pytest.mark.slow(conformance_suite("strategy", "colossalai_zero2", features=FEATURES)))
