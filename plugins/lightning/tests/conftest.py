"""What needs Lightning runs in its environment (``make test-lightning``); elsewhere it skips and says why."""

import sys
from importlib import import_module, util
from pathlib import Path

import pytest

# world.py is core's; test modules import it and what stands here, in this process and in ranks
CORE_TESTS = Path(__file__).parents[3] / "core" / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(CORE_TESTS)]

from world import crowd_control, shared_world, stop_after_failure  # noqa: E402

crowded_worlds_end = crowd_control()
pytest_runtest_logreport = stop_after_failure
world2 = shared_world(2)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request):
    """Either class tree of Lightning."""
    if util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed: make test-lightning")
    return import_module(request.param)
