"""What every test process begins with: interrupts that arrive, limits for this machine, processes that start warm.

No test file leaves a setting behind.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "tests"))
import costs
import distribution
import limits
import simulated
import time_budget
import warm_start

# OpenMP's threads spin while they wait for work, which takes the cores from the other tests: on two cores, with four
# workers, two threads in each cost more than twice the CPU time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts a background job with SIGINT ignored, and what is ignored stays so in every process started from there:
# the tests of Ctrl-C would wait for runs that nothing can interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    limits.install()
    time_budget.start(config)
    if not getattr(config.option, "numprocesses", None):  # xdist's own workers start as ever
        warm_start.install()


@pytest.hookimpl(trylast=True)  # when -m and -k have deselected
def pytest_collection_modifyitems(config, items):
    limits.scale_timeouts(config, items)
    simulated.skip_on_another_torch(items)
    distribution.order(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with warm_start.only_if(item.get_closest_marker("cold_start") is None):
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before the fixtures of a class
def pytest_runtest_setup():
    time_budget.skip_if_late()


def pytest_terminal_summary(terminalreporter):
    costs.write_summary(terminalreporter)


SETTINGS = (
    "TORCHHAL_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "SLURM_", "HABANA_", "HLS_",
    "PYTHONPATH",
)  # fmt: skip


def _settings():
    """All but the seed, which ``seed_everything`` leaves for the processes of a launch."""
    kept = {name: value for name, value in os.environ.items() if value and name.startswith(SETTINGS)}
    kept.pop("TORCHHAL_SEED", None)
    return kept


@pytest.fixture(autouse=True, scope="module")
def settings_are_left_as_found():
    """The next test file in the same process, and all that it starts, would train by what is left behind."""
    before = _settings()
    yield
    assert _settings() == before
