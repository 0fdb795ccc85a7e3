"""ddp on two devices against the plain loop on the batches of both: python ddp.py gpu|sim STRATEGY FOLDER [fails]"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Trainer, seed_everything

ACCELERATOR, STRATEGY, FOLDER, *FAILS = sys.argv[1:]


class Line(nn.Linear):
    def training_step(self, batch, batch_idx):
        if FAILS and batch_idx == 3 and self.weight.device.index == 1:
            raise RuntimeError("no such luck")
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    x = torch.randn(320, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    seed_everything(0)
    model, reference = Line(8, 1), Line(8, 1)
    reference.load_state_dict(model.state_dict())
    trainer = Trainer(
        accelerator=ACCELERATOR, strategy=STRATEGY, devices=2, max_epochs=1, default_root_dir=FOLDER,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(dataset, 16))  # each rank takes every other sample
    optimizer = reference.configure_optimizers()
    for batch in DataLoader(dataset, 32):
        optimizer.zero_grad()
        reference.training_step(batch, 0).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-4, atol=1e-5)
    trainer.print("equal")


if __name__ == "__main__":
    main()
