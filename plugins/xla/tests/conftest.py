"""What needs torch_xla runs in its environment (``make test-xla``), on PJRT's CPU; elsewhere it skips and says why."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # test modules and scripts share the models in xla_training.py

collect_ignore = ["scripts"]


@pytest.fixture(scope="session")
def torch_xla():
    """Skips where torch_xla can't be used."""
    from torchhal_xla import _sdk as sdk

    if why := sdk.problem():
        pytest.skip(why)
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch
    import torch_xla

    torch.zeros(1, device="xla")  # before the first backward of a plain loop: see _check_autograd
    return torch_xla
