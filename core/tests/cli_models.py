"""Define a model and data whose arguments a command line sets, for the tests of TrainerCLI."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import DataModule, EarlyStopping, Module
from torchhal.trainer_cli import LRSchedulerCallable, OptimizerCallable


class Encoder(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(nn.Linear(6, width))

    def forward(self, x):
        return self.layers(x)


class DeepEncoder(Encoder):
    def __init__(self, width: int = 4, depth: int = 2):
        super().__init__(width)
        self.layers.extend(nn.Linear(width, width) for _ in range(depth - 1))


class Net(Module):
    """A classifier.

    Args:
        lr: learning rate of SGD.
        encoder: what the head follows.
        classes: how many there are.
    """

    def __init__(self, lr: float = 0.01, encoder: Encoder | None = None, classes: int = 2):
        super().__init__()
        self.lr = lr
        self.encoder = encoder or Encoder()
        self.head = nn.Linear(self.encoder.width, classes)

    def loss(self, batch):
        return F.cross_entropy(self.head(self.encoder(batch[0])), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.head(self.encoder(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class SavingNet(Net):
    """One that chooses its hyperparameters itself."""

    def __init__(self, lr: float = 0.01, secret: str = ""):
        super().__init__(lr)
        self.save_hyperparameters("lr")


class OptimizerNet(Net):
    def __init__(self, optimizer: OptimizerCallable, scheduler: LRSchedulerCallable | None = None):
        super().__init__()
        self.make_optimizer, self.make_scheduler = optimizer, scheduler

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        return optimizer if self.make_scheduler is None else ([optimizer], [self.make_scheduler(optimizer)])


class Data(DataModule):
    """Samples of as many classes.

    Args:
        batch_size: of every loader.
        classes: how many there are.
    """

    def __init__(self, batch_size: int = 4, classes: int = 2):
        super().__init__()
        self.batch_size, self.classes = batch_size, classes

    def loader(self):
        generator = torch.Generator().manual_seed(1)
        samples = torch.randn(16, 6, generator=generator)
        return DataLoader(TensorDataset(samples, torch.arange(16) % self.classes), self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class StopEarly(EarlyStopping):
    """A callback whose name no other class has, as EarlyStopping's has in a process that imitates Lightning."""
