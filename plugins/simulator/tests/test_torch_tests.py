"""torch's own databases of modules and optimizers, through its device-generic tests, as an outside check."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "simulator_torch_tests.py"


def judge(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_modules_and_optimizers_do_what_they_do_on_the_cpu():
    done = judge()
    assert done.returncode == 0, done.stdout + done.stderr
    passed, made = map(int, re.search(r": (\d+) of (\d+) tests pass", done.stdout).groups())
    assert made > 250
    assert passed >= made - 1, done.stdout  # no fused attention: the fourth digit of its gradients is another kernel's


UPSTREAM = """\
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase, run_tests


class TestShape(TestCase):
    def test_passes(self, device):
        self.assertEqual(torch.ones(2, device=device).device.type, "sim")

    def test_fails(self, device):
        torch.ones(2, device=device) + torch.ones(3, device=device)

    def test_is_skipped(self, device):
        self.skipTest("not here")


instantiate_device_type_tests(TestShape, globals())
"""


def test_a_file_of_a_checkout_runs_on_the_device(tmp_path):
    (tmp_path / "test_shape_ops.py").write_text(UPSTREAM)
    done = judge("--tests", str(tmp_path))
    assert "test_shape_ops.py: 1 of 2 tests pass (50.0%), 1 skipped by torch\n" in done.stdout
    assert re.search(r"  1 x RuntimeError: The size of tensor a .* \(such as test_fails_sim\)", done.stdout), (
        done.stdout
    )


def test_a_file_that_ends_the_process_is_reported(tmp_path):
    (tmp_path / "test_shape_ops.py").write_text("import os\nos._exit(3)\n")
    done = judge("--tests", str(tmp_path))
    assert "1 x the process ended before the tests did" in done.stdout
