"""Define a one-weight model with every step, a data module, and a fit of them that writes and shows nothing."""

import torch
from quiet_trainer import make
from torch import nn

from torchhal import DataModule, Module


def batches(count=2, size=2):
    return [torch.full((size, 1), float(index + 1)) for index in range(count)]


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch).pow(2).mean())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model=None, train=None, val=None, *callbacks, **options):
    model = model or Net()
    trainer = make(*callbacks, **options)
    trainer.fit(model, batches() if train is None else train, val)
    return trainer, model


class Data(DataModule):
    def __init__(self):
        self.calls = []

    def prepare_data(self):
        self.calls.append(("prepare", self.trainer.state.fn))

    def setup(self, stage):
        self.calls.append(("setup", stage, self.trainer.training, self.trainer.testing))

    def teardown(self, stage):
        self.calls.append(("teardown", stage))

    def train_dataloader(self):
        return batches(2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Scored(Net):
    def validation_step(self, batch, batch_idx):
        self.log("score", [3.0, 1.0, 2.0, 4.0][self.current_epoch])
