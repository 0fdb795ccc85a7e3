"""What needs Colossal-AI runs in its environment (``make test-colossalai``); elsewhere it skips and says why."""

import sys
from pathlib import Path

import pytest

# world.py and parity_models.py are core's; test modules import them and what stands here, in this process and in ranks
CORE_TESTS = Path(__file__).parents[3] / "core" / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(CORE_TESTS)]

from world import crowd_control, shared_world, stop_after_failure  # noqa: E402

crowded_worlds_end = crowd_control()
pytest_runtest_logreport = stop_after_failure
shared2 = shared_world(2)
shared3 = shared_world(3)


class PatientWorld:
    """A world whose first call may have to import Colossal-AI, which takes long where other tests run beside it."""

    def __init__(self, world):
        self.world = world

    def run(self, function, *args, timeout=120):
        return self.world.run(function, *args, timeout=timeout)


@pytest.fixture
def world2(shared2):
    return PatientWorld(shared2)


@pytest.fixture
def world3(shared3):
    return PatientWorld(shared3)


@pytest.fixture(scope="session")
def colossalai():
    """Skips where Colossal-AI can't be used."""
    from torchhal_colossalai import _sdk as sdk

    if why := sdk.COLOSSALAI.problem():
        pytest.skip(why)
