"""The model and the data of the scripts, and the plain loop that they are compared with."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module

BATCH, STEPS = 8, 6


class Net(Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples():
    x = torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(1))
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


def loader(batch=BATCH):
    return DataLoader(TensorDataset(*samples()), batch)


def plain(make=None, epochs=2, clip=None):
    """Plain PyTorch on the CPU: one process, the joined batches."""
    torch.manual_seed(0)
    model = (make or Net)()
    optimizer = model.configure_optimizers()
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


def difference(state, model):
    """The largest difference between a state dict and a model's, over all parameters."""
    own = model.state_dict()
    assert state.keys() == own.keys()
    return max(float((state[name].cpu() - own[name]).abs().max()) for name in own)
