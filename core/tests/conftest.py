"""The worlds of processes that tests share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # test modules import world, in this process and in its ranks


def _world(size):
    from world import World

    world = World(size)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def world2():
    """Two processes."""
    yield from _world(2)


@pytest.fixture(scope="session")
def world3():
    """Three processes."""
    yield from _world(3)


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def world(request):
    """Two processes, then three."""
    return request.getfixturevalue(f"world{request.param}")
