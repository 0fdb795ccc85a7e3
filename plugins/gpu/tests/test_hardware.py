"""What needs a GPU runs wherever torch finds one; most of it runs on the simulated device, too.

In processes of their own: what other tests load here, the simulated device for one, would be torch's accelerator.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from torchhal_gpu.cuda import GPUAccelerator

SCRIPTS = Path(__file__).parent / "scripts"
EVERYWHERE = re.findall(r"^def (check_\w+)", (SCRIPTS / "hardware.py").read_text(), re.MULTILINE)
GPU_ONLY = re.findall(r"^def (gpu_check_\w+)", (SCRIPTS / "hardware.py").read_text(), re.MULTILINE)

gpu = pytest.mark.skipif(not GPUAccelerator.availability(), reason="environment: no GPU that torch can use")
gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="environment: fewer than two GPUs")
on_gpu, on_gpus, on_sim = (
    pytest.param("gpu", marks=gpu), pytest.param("gpu", marks=gpus), pytest.param("sim", marks=pytest.mark.timeout(300))
)  # fmt: skip


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@cache
def simulator_missing():
    return python("from torchhal_simulator.accelerator import SimAccelerator as S; print(S.availability().reason)")


def need(hardware):
    if hardware == "sim" and (why := simulator_missing()):
        pytest.skip(f"environment: {why}")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """``results(hardware)``: what the script found there, once for all checks."""
    known = {}

    def run(hardware):
        need(hardware)
        if hardware not in known:
            folder = tmp_path_factory.mktemp(hardware)
            script = [str(SCRIPTS / "hardware.py"), hardware, str(folder / "results.json"), str(folder)]
            done = subprocess.run([sys.executable, *script], capture_output=True, text=True, timeout=280, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            known[hardware] = json.loads((folder / "results.json").read_text())
        return known[hardware]

    return run


@pytest.mark.parametrize("hardware", [on_gpu, on_sim])
@pytest.mark.parametrize("check", EVERYWHERE)
def test_everywhere(results, hardware, check):
    found = results(hardware)
    assert found[check] == "", found[check]


@gpu
@pytest.mark.parametrize("check", GPU_ONLY)
def test_on_a_gpu(results, check):
    found = results("gpu")
    assert found[check] == "", found[check]


def run_ddp(*arguments):
    script = [sys.executable, str(SCRIPTS / "ddp.py"), *map(str, arguments)]
    return subprocess.run(script, capture_output=True, text=True, timeout=170, check=False)


@pytest.mark.parametrize(
    ("hardware", "strategy"),
    [pytest.param("gpu", "ddp", marks=gpus), pytest.param("gpu", "ddp_spawn", marks=gpus), ("sim", "ddp")],
)
def test_ddp_equals_the_plain_loop(hardware, strategy, tmp_path):
    need(hardware)
    done = run_ddp(hardware, strategy, tmp_path)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr


@pytest.mark.parametrize("hardware", [on_gpus, on_sim])
def test_a_rank_that_fails_ends_the_run(hardware, tmp_path):
    need(hardware)
    done = run_ddp(hardware, "ddp", tmp_path, "fails")
    assert done.returncode == 1 and "no such luck" in done.stderr and "equal" not in done.stdout, done.stderr


# -- before anything starts ----------------------------------------------------------------------------------


@gpu
def test_a_fork_after_the_probe_can_use_the_device():
    python(
        "import os, sys, torch\nfrom torchhal_gpu.cuda import GPUAccelerator\n"
        "assert GPUAccelerator.availability() and GPUAccelerator().parse_devices('auto')\n"
        "child = os.fork()\n"
        "if not child:\n    torch.ones(1, device='cuda'); os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )


@gpu
@pytest.mark.parametrize("hidden", ["-1", ""])
def test_hidden_devices_are_not_there(hidden):
    python(
        "from torchhal_gpu.cuda import GPUAccelerator\n"
        "available = GPUAccelerator.availability()\n"
        "assert not available and 'CUDA_VISIBLE_DEVICES' in available.reason, available\n",
        CUDA_VISIBLE_DEVICES=hidden,
    )


@gpu
def test_a_device_by_its_uuid_is_one():
    """Of a part of a device (MIG), too: its UUID is what torch tells of it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if torch.version.hip is not None or "MIG" in visible:
        pytest.skip("environment: ROCm, or a part of a device")
    uuid = python("import torch; print(torch.cuda.get_device_properties(0).uuid)")
    count = "from torchhal_gpu.cuda import GPUAccelerator as G; print(G().parse_devices('auto'), G().parse_devices(-1))"
    assert python(count, CUDA_VISIBLE_DEVICES=f"GPU-{uuid}") == "(0,) (0,)"
