"""What every test process begins with: interrupts that arrive, and no setting that another test file left behind."""

import os
import signal

import pytest

# A shell starts a background job with SIGINT ignored, and what is ignored stays so in every process started from there:
# the tests of Ctrl-C would wait for runs that nothing can interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
