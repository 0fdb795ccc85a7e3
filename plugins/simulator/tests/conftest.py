"""The worlds of two processes that tests share, one for each flavour."""

import os
import sys
from pathlib import Path

import pytest

# world.py and running.py are core's; test modules import them and joining.py here, in this process and in its ranks
CORE_TESTS = Path(__file__).parents[3] / "core" / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(CORE_TESTS), str(CORE_TESTS / "scripts")]


@pytest.fixture(scope="session", params=["sim", "hpu"])
def flavour(request):
    return request.param


@pytest.fixture
def device():
    """The first device of the one flavour that this process tests; ``test_hpu.py`` starts a process for the other."""
    import torch

    from torchhal_simulator import load

    flavour = os.environ.get("SIMULATOR_TESTS_FLAVOUR", "sim")
    load(flavour)
    return torch.device(flavour, 0)


@pytest.fixture
def second(device):
    """The second device of a flavour that has several in one process."""
    import torch

    if device.type == "hpu":
        pytest.skip("one index per process")
    return torch.device(device.type, 1)


@pytest.fixture(scope="session")
def world(flavour):
    """Two processes; a flavour has its own, as a process that has used the one device is marked by it."""
    from world import World

    world = World(2)
    yield world
    world.stop()
