"""What tests run on: each accelerator in turn, and the worlds of processes that they share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # test modules import world, in this process and in its ranks

from world import crowd_control, shared_world, stop_after_failure


def pytest_generate_tests(metafunc):
    if "accelerator" in metafunc.fixturenames:
        from hardware import ACCELERATORS

        alone = metafunc.definition.get_closest_marker("one_accelerator") is not None
        marks = [pytest.mark.slow] if metafunc.definition.get_closest_marker("slow_on_sim") is not None else []
        others = [] if alone else [pytest.param(name, marks=marks) for name in ACCELERATORS[1:]]
        metafunc.parametrize("accelerator", [*ACCELERATORS[:1], *others], indirect=True)


@pytest.fixture
def accelerator(request, monkeypatch):
    """The name of the accelerator that the test runs on, here, in its ranks and in its scripts: see hardware.py."""
    import hardware

    if why := hardware.missing(request.param):
        pytest.skip(why)
    monkeypatch.setenv(hardware.VARIABLE, request.param)
    hardware.accelerator()
    return request.param


crowded_worlds_end = crowd_control()
pytest_runtest_logreport = stop_after_failure
world2 = shared_world(2)
world3 = shared_world(3)
world4 = shared_world(4)


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def world(request):
    """Two processes, then three."""
    return request.getfixturevalue(f"world{request.param}")
