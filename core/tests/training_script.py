"""Run scripts/train.py with a configuration, and find the processes that it left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from limits import scaled
from torch.nn import functional as F

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


class Run:
    def __init__(self, process, out, seconds):
        self.code = process.returncode
        self.stdout, self.stderr = process.communicated
        self.out = out
        self.seconds = seconds

    def rank(self, rank):
        return torch.load(self.out / f"rank{rank}.pt", weights_only=False)


def start(out, *, command=None, **config):
    out.mkdir(exist_ok=True)
    config["out"] = str(out)
    environment = {**os.environ, "TORCHHAL_TEST_MARK": str(out), "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [*(command or [sys.executable]), str(SCRIPT), json.dumps(config)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, out, timeout=150):
    began = time.monotonic()
    try:
        process.communicated = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicated = process.communicate()
        pytest.fail(f"hung for {timeout} s\n{process.communicated[1][-4000:]}")
    return Run(process, out, time.monotonic() - began)


def run(out, *, command=None, timeout=150, **config):
    return finish(start(out, command=command, **config), out, timeout)


def leftovers(out):
    """Return the processes of this run that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"TORCHHAL_TEST_MARK={out}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def assert_nothing_left(out):
    deadline = time.monotonic() + scaled(5)
    while leftovers(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not leftovers(out)


def single_process(epochs=3, global_batch=16, n=48):
    """Train in one process on the joined batches: rank r has samples r, r + 2, ... of each epoch."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import train
    finally:
        sys.path.pop(0)
    torch.manual_seed(0)
    model = train.Net({})
    optimizer = model.configure_optimizers()
    x, y, _ = train.dataset(n)[:]
    for _ in range(epochs):
        for begin in range(0, n, global_batch):
            optimizer.zero_grad()
            F.cross_entropy(model.body(x[begin : begin + global_batch]), y[begin : begin + global_batch]).backward()
            optimizer.step()
    return model
