"""Worlds of two, four and eight processes that the tests share."""

import sys
from pathlib import Path

import pytest
import torch

# world.py and hardware.py are core's; test modules import them and what stands here, in this process and in its ranks
CORE_TESTS = Path(__file__).parents[3] / "core" / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(CORE_TESTS)]

from world import crowd_control, shared_world, stop_after_failure  # noqa: E402

crowded_worlds_end = crowd_control()
pytest_runtest_logreport = stop_after_failure
world2 = shared_world(2)
world4 = shared_world(4)
world8 = shared_world(8)


@pytest.fixture
def one_thread():
    """One thread of torch's, as the number of threads decides the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def place(request):
    """(accelerator, devices)."""
    if request.param[0] == "sim":
        pytest.importorskip("torchhal_simulator")
    return request.param
