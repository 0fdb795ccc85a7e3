"""Train a small classifier for three steps and save it: ``train_alias.py DEVICES FOLDER TRAINER_ARGUMENTS_AS_JSON``.

Every process that computes a loss leaves an empty file of its number in FOLDER/processes.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Trainer


class Net(nn.Sequential):
    tensor_parallel_plan = {"0": "colwise", "2": "rowwise"}

    def __init__(self, folder):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.folder = folder

    def training_step(self, batch, batch_idx):
        (self.folder / str(os.getpid())).touch()
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Compiled(nn.Module):
    """For a compiled step, whose forward returns the loss."""

    def __init__(self, folder):
        super().__init__()
        self.net = Net(folder)

    def training_step(self, batch, batch_idx):
        return self.net.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return self.net.configure_optimizers()


def main(devices, folder, arguments):
    torch.manual_seed(0)
    samples = torch.randn(48, 4)
    data = DataLoader(TensorDataset(samples, (samples.sum(1) > 0).long()), batch_size=4, drop_last=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(devices=devices, max_steps=3, default_root_dir=folder, **quiet, **arguments)
    processes = Path(folder) / "processes"
    processes.mkdir(exist_ok=True)
    model = (Compiled if arguments.get("accelerator") == "ipu" else Net)(processes)
    trainer.fit(model, data)
    assert trainer.global_step == 3
    sys.stdout.write(f"trained {type(trainer.strategy).__name__}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
