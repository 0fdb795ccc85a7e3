"""The signal that announces a job's end, and the requeue, belong to the job of Slurm's, whoever starts the ranks.

The cycle itself runs on the real Slurm, in tests/test_clusters.py; here a scontrol notes what it is asked for, and ends
who asked, as Slurm does.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from limits import scaled
from running import Job

from torchhal import Module, Trainer
from torchhal.errors import ConfigurationError

TRAIN = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchhal


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        with open(f"step-{self.trainer.global_rank}", "w") as file:
            file.write(str(self.trainer.global_step))
        time.sleep(0.1)
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torchhal.Trainer(
        accelerator="cpu", strategy=sys.argv[1], devices=int(sys.argv[2]), max_epochs=1000, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=".",
    ).fit(Net(), DataLoader(TensorDataset(torch.randn(64, 8)), 4), ckpt_path="last")
"""


@pytest.fixture
def job_of_slurm(tmp_path):
    """A script that trains in a job of Slurm's which started one task, or none: the process, when its ranks train."""
    started = []
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nkill -TERM $PPID $$\n')
    scontrol.chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)

    def start(strategy, devices, **variables):
        step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        one = Job(
            sys.executable, "train.py", strategy, devices,
            cwd=tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin", SLURM_JOB_ID="4711", **step, **variables,
        )  # fmt: skip
        started.append(one)
        deadline = time.monotonic() + scaled(90)
        while not all((tmp_path / f"step-{rank}").exists() for rank in range(devices)):
            assert time.monotonic() < deadline and one.process.poll() is None, one.process.communicate()
            time.sleep(0.05)
        return one

    yield start
    for one in started:
        one.kill()


CASES = [
    pytest.param("auto", 1, id="one process"),
    pytest.param("ddp", 2, id="script"),
    pytest.param("ddp_fork", 2, id="fork"),
    pytest.param("ddp_spawn", 2, id="spawn", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "devices"), CASES)
def test_the_signal_saves_and_requeues(job_of_slurm, tmp_path, strategy, devices):
    """Slurm signals every process of the step."""
    one = job_of_slurm(strategy, devices, TORCHHAL_REQUEUE="1")
    os.killpg(one.process.pid, signal.SIGUSR1)
    one.finish()
    assert one.code == 128 + signal.SIGUSR1, one.err
    assert "fit stopped on SIGUSR1 at step" in one.err and "; saved " in one.err, one.err
    assert "torchhal: job 4711 is requeued" in one.err, one.err
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    assert not one.left


def test_without_the_switch_the_signal_saves(job_of_slurm, tmp_path):
    one = job_of_slurm("auto", 1)
    one.process.send_signal(signal.SIGUSR1)
    one.finish()
    assert one.code == 128 + signal.SIGUSR1, one.err
    assert "; saved " in one.err and "requeue" not in one.err
    assert not (tmp_path / "asked").exists()


def test_own_handler_stays_with_warning(monkeypatch):
    """A handler of the program for the scheduler's signal stays, with a warning."""

    class Model(Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            signal.raise_signal(signal.SIGUSR1)
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    called = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: called.append(signum))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=3, enable_progress_bar=False
    )
    try:
        with pytest.warns(UserWarning, match=r"SIGUSR1.*has a handler of the program's own, which stays: fit does not"):
            trainer.fit(Model(), [torch.ones(2, 2)] * 3)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert trainer.global_step == 3 and called == [signal.SIGUSR1] * 3


def test_invalid_requeue_switch_refused(monkeypatch):
    """A requeue switch that is neither 1 nor 0 is refused before the training."""
    monkeypatch.setenv("TORCHHAL_REQUEUE", "yes")
    with pytest.raises(ConfigurationError, match=r"TORCHHAL_REQUEUE must be 1 or 0.*'yes'"):
        Trainer(accelerator="cpu", logger=False)


def test_requeue_without_job_is_noted(monkeypatch):
    """A requeue without a job is a note of the plan."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHHAL_REQUEUE", "1")
    notes = Trainer(accelerator="cpu", logger=False).plan.notes
    assert any("belongs to no job of Slurm's (SLURM_JOB_ID is not set)" in note for note in notes)
