"""Run scripts/run_*.py as jobs, read what their ranks recorded, and train the same by a plain loop."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from training_script import assert_nothing_left

__all__ = ["Job", "assert_nothing_left", "losses", "plain_losses", "read", "run_job", "seen"]

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass
class Job:
    """How a job has ended.

    Attributes:
        code: exit status of the process that was started; of a signal negative.
        said: standard output and error.
        since_failure: seconds from the misdeed to the end; 0 without one.
    """

    code: int
    said: str
    since_failure: float


def run_job(folder, script, *, command=(), cwd=None, timeout=150, **config):
    """Run a script of scripts/ to its end.

    Args:
        folder: of the job, where its ranks record their batches.
        script: its name.
        command: starts the interpreter, such as torchrun.
        cwd: None for the folder.
        timeout: seconds, on an idle machine.
        **config: for the script; see run_parts.py.
    """
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "TORCHHAL_TEST_MARK": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, sys.executable, str(SCRIPTS / script), json.dumps({"out": str(folder), **config})],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=cwd or folder, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"hung for {timeout} s\n{process.communicate()[0][-4000:]}")
    failed = folder / "failed"
    since = time.time() - float(failed.read_text()) if failed.exists() else 0.0
    failed.unlink(missing_ok=True)
    return Job(process.returncode, said, since)


def read(folder, rank):
    """Return the batches that a rank has recorded."""
    path = folder / f"rank{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) if line else None for line in lines]


def losses(batches):
    return [batch["loss"] for batch in batches]


def seen(batches):
    """Return the samples of each batch; none for one that another number of ranks had."""
    return [[] if batch is None else batch["seen"] for batch in batches]


def plain_losses(batches):
    """Return the losses of a loop in this process whose batches have these samples."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import run_parts
    finally:
        sys.path.pop(0)
    torch.manual_seed(0)
    model = run_parts.Net()
    optimizer = run_parts.make_optimizer(model)
    x, y, _ = run_parts.dataset()[:]
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
