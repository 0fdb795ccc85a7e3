"""The conformance checks, on PJRT's CPU, in a process of their own: torch counts devices at its first backward."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchhal_conformance import ComponentUnderTest, Session, checks_for

SLICES = Path(__file__).with_name("slices.json")
"""What torch_xla.launch sets on two hosts with two processes each, and on one host with four."""

SUITE = """
import json
import pathlib

import torch
import torch_xla
from torchhal_conformance import conformance_suite

torch.zeros(1, device="xla")  # the checks' plain loops run a backward before their first run on the device
TestXLA = conformance_suite("accelerator", "xla")
TestTPU = conformance_suite("accelerator", "tpu")
TestPJRT = conformance_suite("cluster_environment", "pjrt", **json.loads(pathlib.Path("slices.json").read_text()))
TestSingle = conformance_suite("strategy", "single_xla", accelerator="xla")
TestReplicas = conformance_suite("strategy", "xla", accelerator="xla")
TestSPMD = conformance_suite("strategy", "xla_spmd", accelerator="xla")
TestFSDP = conformance_suite("strategy", "xla_fsdp", accelerator="xla")
TestFile = conformance_suite("checkpoint_io", "xla")
"""


@pytest.mark.timeout(800)
@pytest.mark.usefixtures("torch_xla")
def test_they_conform(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    shutil.copy(SLICES, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_suite.py"], cwd=tmp_path,
        env={**os.environ, "PJRT_DEVICE": "CPU"}, capture_output=True, text=True, timeout=780, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_environment_conforms_without_torch_xla():
    """Its variables need no runtime."""
    component = ComponentUnderTest.of("cluster_environment", "pjrt", **json.loads(SLICES.read_text()))
    with Session(component) as session:
        results = [session.run(one) for one in checks_for("cluster_environment") if one.id.startswith("ENV")]
    assert [result.text for result in results if result.outcome == "failed"] == []
    assert {result.check.id for result in results if result.outcome == "passed"} >= {"ENV-06", "ENV-12", "ENV-50"}
