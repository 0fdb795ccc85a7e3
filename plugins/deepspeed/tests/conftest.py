"""Worlds of two and three processes that the tests share; DeepSpeed compiles nothing in them."""

import sys
from pathlib import Path

# world.py and hardware.py are core's; test modules import them and what stands here, in this process and in its ranks
CORE_TESTS = Path(__file__).parents[3] / "core" / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(CORE_TESTS)]

from world import crowd_control, shared_world, stop_after_failure  # noqa: E402

crowded_worlds_end = crowd_control()
pytest_runtest_logreport = stop_after_failure
world2 = shared_world(2)
world3 = shared_world(3)
