"""The same tests on the second flavour.

It has a process of its own: torch has one accelerator per process, and takes PrivateUse1 where it is registered. The
autograd engine then fails for tensors on HPU with an internal assertion (pytorch#161129).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FILES = ["test_device.py", "test_limits.py", "test_memory.py", "test_mixing.py", "test_random.py", "test_training.py"]


@pytest.mark.parametrize("file", FILES)
def test_on_hpu(file):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name(file))],
        env={**os.environ, "SIMULATOR_TESTS_FLAVOUR": "hpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
