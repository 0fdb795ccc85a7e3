"""The conformance checks, on PJRT's CPU, in a process of their own: torch counts devices at its first backward."""

import os
import subprocess
import sys

import pytest

SUITE = """
import torch
import torch_xla
from torchhal_conformance import conformance_suite

torch.zeros(1, device="xla")  # the checks' plain loops run a backward before their first run on the device
TestXLA = conformance_suite("accelerator", "xla")
TestTPU = conformance_suite("accelerator", "tpu")
SLICE = [
    {"TPU_WORKER_HOSTNAMES": "t-0,t-1", "TPU_WORKER_ID": host, "PJRT_LOCAL_PROCESS_COUNT": "2",
     "PJRT_LOCAL_PROCESS_RANK": process}
    for host in "01" for process in "01"
]
ENV06 = "without the hosts' names there is one host, and without the number of processes torchhal starts them"
ENV12 = "a process that torchhal has started on a slice takes its numbers from torchhal"
TestPJRT = conformance_suite(
    "cluster_environment", "pjrt", tables=SLICE, expected_failures={"ENV-06": ENV06, "ENV-12": ENV12}
)
TestSingle = conformance_suite("strategy", "single_xla", accelerator="xla")
TestReplicas = conformance_suite("strategy", "xla", accelerator="xla")
TestSPMD = conformance_suite("strategy", "xla_spmd", accelerator="xla")
TestFSDP = conformance_suite("strategy", "xla_fsdp", accelerator="xla")
TestFile = conformance_suite("checkpoint_io", "xla")
"""


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("torch_xla")
def test_they_conform(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_suite.py"], cwd=tmp_path,
        env={**os.environ, "PJRT_DEVICE": "CPU"}, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
