"""The model and the data of the scripts, and the plain loop that they are compared with."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer

SAMPLES = 96
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(Module):
    def __init__(self, optimizer="sgd", scheduler=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16))
        self.head = nn.Linear(16, 3)
        self.kind, self.scheduler = optimizer, scheduler

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        make = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
            "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
        }[self.kind]
        optimizer = make(self.parameters())
        if self.scheduler is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.scheduler}}


def samples(count=SAMPLES):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long())


def loader(batch, count=SAMPLES, **options):
    return DataLoader(samples(count), batch, **options)


def made(cls=Net, *args):
    torch.manual_seed(0)
    return cls(*args)


def trainer(**options):
    given = {"accelerator": "ipu", "devices": 1, "max_epochs": 2, "enable_checkpointing": False, **QUIET, **options}
    return Trainer(**given)


def plain(model, batch, epochs=2, clip=None):
    """Plain PyTorch: each batch is one step. The losses of the steps."""
    configured = model.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    losses = []
    for _ in range(epochs):
        for x, y in loader(batch, drop_last=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
            if model.scheduler == "step":
                configured["lr_scheduler"]["scheduler"].step()
        if model.scheduler == "epoch":
            configured["lr_scheduler"]["scheduler"].step()
    return losses


def difference(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
