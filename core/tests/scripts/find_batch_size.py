"""Search a batch size by the strategy that is named, on two ranks of which one has less memory, then fit."""

import os
import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer
from torchhal.tuning import find_batch_size


class Net(Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if len(x) > 100 and self.trainer.global_rank == 1:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return mse_loss(self.body(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Net()
    sizes = [
        find_batch_size(trainer, model, DataLoader(data, 4), start=32, mode=mode, margin=0.0)
        for mode in ("binary", "power")
    ]
    trainer.fit(model, DataLoader(data, 50))
    line = f"found {', '.join(map(str, sizes))}; then {trainer.global_step} steps\n"
    os.write(1, line.encode())  # print may write the end of the line by itself, after another process's line
