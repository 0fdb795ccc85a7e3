"""A training job on two simulated devices; what goes wrong is told by the environment, or happens at step 3.

    python train_on.py FLAVOUR OUT TIMEOUT [COLLECTIVE]

Each rank writes its device to OUT/rank<r>, and, if COLLECTIVE is given, enters ``simulate(collective=COLLECTIVE)`` at
step 3. The time of step 3 goes to OUT/step3.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, Module, Trainer
from torchhal.accelerators import Accelerator
from torchhal.strategies import DDPStrategy
from torchhal_simulator import load, simulate


class SimHPU(Accelerator):
    """The HPU flavour: one device per process, without an index."""

    name = "simhpu"
    device_type = "hpu"
    backend = "hccl"
    indexed = False

    @classmethod
    def load(cls):
        load("hpu")


class Net(Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.body(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AtStep3(Callback):
    def __init__(self, out, collective):
        self.out = Path(out)
        self.collective = collective

    def on_train_start(self, trainer, module):
        device = next(module.parameters()).device
        (self.out / f"rank{trainer.global_rank}").write_text(str(device))

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx != 2:
            return
        (self.out / "step3").write_text(str(time.time()))
        if self.collective:
            self.fault = simulate(collective=self.collective)
            self.fault.__enter__()


def main(flavour, out, timeout, collective=""):
    trainer = Trainer(
        accelerator="sim" if flavour == "sim" else SimHPU(),
        devices=2,
        strategy=DDPStrategy(timeout=timedelta(seconds=float(timeout))),
        max_steps=6,
        callbacks=[AtStep3(out, collective)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4))
    print(f"rank {trainer.global_rank} done after {trainer.global_step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
