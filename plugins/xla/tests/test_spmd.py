"""SPMD over four CPU devices. It can't be switched off again, so the checks of ``scripts/spmd.py`` share a process."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "spmd.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def results(torch_xla, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spmd")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "results.json"), str(folder)], capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_spmd(results, check):
    assert results[check] == "", results[check]
