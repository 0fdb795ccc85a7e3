"""What a script of ``job_processes`` trains: a small model for twelve short epochs.

The script is called with a folder and options: ``slow``, ``fails`` (rank 1, in its third batch), ``unused`` (the first
layer, on rank 1 in its third batch), ``ckpt=PATH``,
``devices=N``, ``nodes=N``, ``timeout=S``, and what else it reads of :data:`OPTIONS` itself.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Callback, Trainer

FOLDER = Path(sys.argv[1])
OPTIONS = dict(option.partition("=")[::2] for option in sys.argv[2:])
TIMEOUT = timedelta(seconds=float(OPTIONS.get("timeout", 60)))


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        if "slow" in OPTIONS:
            time.sleep(0.1)
        if "fails" in OPTIONS and batch_idx == 2 and self.trainer.global_rank == 1:
            raise ValueError("the cause")
        x, y = batch
        if "unused" in OPTIONS and batch_idx == 2 and self.trainer.global_rank == 1:
            return F.mse_loss(self.body[1:](x.repeat(1, 2)), y)
        return F.mse_loss(self.body(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Tell(Callback):
    """Leaves the process id of each rank when the first step is done."""

    def on_train_batch_end(self, trainer, *args):
        path = FOLDER / f"rank-{trainer.global_rank}"
        if not path.exists():
            path.write_text(str(os.getpid()))


def train(strategy):
    """Train under ``strategy``; rank 0 writes to the folder what came of it."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(32, 8, generator=generator)
    trainer = Trainer(
        accelerator="cpu", devices=int(OPTIONS.get("devices", 2)), num_nodes=int(OPTIONS.get("nodes", 1)),
        strategy=strategy, max_epochs=12, logger=False, default_root_dir=FOLDER, callbacks=[Tell()],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Net()
    trainer.fit(
        model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4), ckpt_path=OPTIONS.get("ckpt")
    )
    if trainer.is_global_zero:
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        environment = type(trainer.strategy.cluster_environment).__name__
        told = {"weights": weights, "environment": environment, "world": trainer.world_size, "nodes": trainer.num_nodes}
        (FOLDER / "result.json").write_text(json.dumps(told))
