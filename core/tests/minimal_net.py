"""Define a one-weight model, batches for it, and a script that trains it in a process of its own."""

import os
import subprocess
import sys
import textwrap

import torch
from torch import nn

from torchhal import Module

NAN, INF = float("nan"), float("inf")


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = [torch.ones(2, 1), torch.ones(2, 1)]


def refuse_to_start(monkeypatch):
    from torchhal.launchers import ExternalLauncher, MultiprocessingLauncher, SubprocessScriptLauncher

    def launch(self, *args, **kwargs):
        raise AssertionError("a process was started")

    for launcher in (ExternalLauncher, MultiprocessingLauncher, SubprocessScriptLauncher):
        monkeypatch.setattr(launcher, "launch", launch)


SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from torchhal import Callback, Module, Trainer
from torchhal.trainer.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary, ProgressBar

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        pass

    predict_step = test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def teardown(self, stage):
        print("torn down", stage, flush=True)

class At(Callback):
    def __init__(self, hook, act):
        setattr(self, hook, lambda trainer, *args: act(trainer))

def trainer(*callbacks, **options):
    quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                 num_sanity_val_steps=0)
    return Trainer(callbacks=list(callbacks), **{**quiet, **options})

BATCHES = [torch.ones(2, 1)] * 4
folder = sys.argv[1]
"""


def script(tmp_path, body, timeout=60):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(body))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(path), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=timeout, env=environment, cwd=tmp_path, check=False,
    )  # fmt: skip
