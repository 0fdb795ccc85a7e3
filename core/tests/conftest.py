"""Give tests each accelerator in turn, worlds of processes that they share, registries and launcher variables."""

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


@pytest.fixture
def precision_state(accelerator):
    """Tensors on the test's device from one seed; a default dtype or autocast that is left behind fails the test."""
    import hardware
    import torch

    torch.manual_seed(0)
    with hardware.device():
        yield
    clean = torch.get_default_dtype() is torch.float32 and not torch.is_autocast_enabled(hardware.name())
    torch.set_default_dtype(torch.float32)
    assert clean, "the test left a default dtype or autocast behind"


@pytest.fixture
def registry(monkeypatch):
    """A registry without plugins but those of a test, in an environment without a launcher's variables."""
    from plans import RANK_VARIABLES

    from torchhal.testing import isolated_registry

    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with isolated_registry() as fresh:
        yield fresh


@pytest.fixture
def no_leftovers():
    """The removal of plugins in memory after the test: other tests have plugins of the same names."""
    from plans import forget_packages

    yield
    forget_packages()


@pytest.fixture
def torchrun(monkeypatch):
    """A function that sets torchrun's variables: one node of ``local`` processes unless told otherwise."""
    from plans import TORCHRUN

    def start(local=2, nodes=1):
        values = {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": local * nodes, "GROUP_WORLD_SIZE": nodes, "RANK": 0}
        for name, value in {**TORCHRUN, "LOCAL_RANK": 0, "GROUP_RANK": 0, **values}.items():
            monkeypatch.setenv(name, str(value))

    return start
