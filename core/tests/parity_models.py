"""Five models, each with the plain loop that an engine's training of two ranks has to reproduce.

The plain loop runs in one process. It computes the gradients of each rank's half of a batch by itself and adds halves
of them, which is what an average over two ranks computes, to the bit.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Trainer

RANKS = 2
BATCH = 8
"""Samples of a batch, of both ranks together."""
BATCHES = 6
EPOCHS = 2


class ParityModel(torchhal.Module):
    """Model with a classification loss, and Adam unless it says otherwise; it keeps the loss of each step."""

    clip = None
    accumulate = 1

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.losses = []
        self.body = self.build()

    def build(self):
        raise NotImplementedError

    def forward(self, x):
        return self.body(x)

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    @staticmethod
    def dataset():
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(BATCH * BATCHES, 64, generator=generator)
        return TensorDataset(inputs, torch.randint(0, 4, (len(inputs),), generator=generator))


class Perceptron(ParityModel):
    """Dense layers with Adam."""

    def build(self):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


class Convolution(ParityModel):
    """Convolutions and a batch norm, whose buffers an engine must not average; SGD with momentum and a scheduler."""

    def build(self):
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(4 * 36, 4),
        )  # fmt: skip

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Attention(ParityModel):
    """A transformer's block over a sequence of eight, with AdamW and gradients clipped by their norm."""

    clip = 0.5

    def build(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Unflatten(1, (8, 8)), layer, nn.Flatten(), nn.Linear(64, 4))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Tied(ParityModel):
    """Two layers with one weight, a frozen layer between them, and two parameter groups."""

    def build(self):
        first, frozen, last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        last.weight = first.weight
        frozen.requires_grad_(False)
        return nn.Sequential(first, nn.Tanh(), frozen, last, nn.Tanh(), nn.Linear(64, 4))

    def configure_optimizers(self):
        biases = [one for name, one in self.named_parameters() if one.requires_grad and name.endswith("bias")]
        weights = [one for name, one in self.named_parameters() if one.requires_grad and not name.endswith("bias")]
        return torch.optim.Adam([{"params": weights, "lr": 1e-2}, {"params": biases, "lr": 1e-3}])


class Accumulated(Perceptron):
    """Dense layers whose gradients are accumulated over two batches."""

    accumulate = 2


class SparseSum(ParityModel):
    """The sum of two embeddings and a layer's output: torch gives all three gradients in one memory.

    DistributedDataParallel divides the sparse ones in place, before backward has used the third.
    """

    def build(self):
        self.words, self.places = nn.Embedding(8, 64, sparse=True), nn.Embedding(2, 64, sparse=True)
        self.layer = nn.Linear(64, 64)
        return nn.Linear(64, 4)

    def forward(self, x):
        words, places = (x[:, 0] * 4).long().clamp(-4, 3) + 4, (x[:, 1] > 0).long()
        return self.body(torch.tanh(self.words(words) + self.places(places) + self.layer(x)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODELS = {cls.__name__.lower(): cls for cls in (Perceptron, Convolution, Attention, Tied, Accumulated)}


def _make(name):
    return SparseSum() if name == "sparsesum" else MODELS[name]()


def plain(name):
    """Return the losses of each rank and the weights, from a loop with nothing but torch."""
    model = _make(name)
    made = model.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    scheduler = made["lr_scheduler"]["scheduler"] if isinstance(made, dict) else None
    trained = [one for one in model.parameters() if one.requires_grad]
    losses = [[] for _ in range(RANKS)]
    own = [[torch.zeros_like(one) for one in trained] for _ in range(RANKS)]  # each rank's gradients
    for _ in range(EPOCHS):
        for number, batch in enumerate(DataLoader(model.dataset(), batch_size=BATCH)):
            buffers = None
            for rank in range(RANKS):
                before = [one.clone() for one in model.buffers()]
                # as a distributed sampler deals samples out: one to each rank in turn
                loss = model.loss([part[rank::RANKS] for part in batch])
                losses[rank].append(float(loss.detach()))
                for sum_, gradient in zip(
                    own[rank], torch.autograd.grad(loss / model.accumulate, trained), strict=True
                ):
                    sum_ += gradient
                buffers = buffers or [one.clone() for one in model.buffers()]  # those of rank 0 count
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            if (number + 1) % model.accumulate:
                continue
            for index, one in enumerate(trained):
                one.grad = sum(gradients[index] / RANKS for gradients in own)
                for gradients in own:
                    gradients[index].zero_()
            if model.clip is not None:
                nn.utils.clip_grad_norm_(trained, model.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return {"losses": losses, "state": {key: value.clone() for key, value in model.state_dict().items()}}


def trained(name, strategy, **options):
    """In a rank of two: return what :func:`plain` returns, trained by a Trainer under ``strategy``."""
    model = _make(name)
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=RANKS, max_epochs=EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=model.clip, accumulate_grad_batches=model.accumulate, **options,
    )  # fmt: skip
    # the Trainer's sampler deals these batches of half the size out without shuffling
    trainer.fit(model, DataLoader(model.dataset(), batch_size=BATCH // RANKS))
    return {"losses": model.losses, "state": {key: value.clone() for key, value in model.state_dict().items()}}


def same(results, reference, compare=torch.equal):
    """Fail unless the ranks' losses and weights are those of the plain loop; running statistics are rank 0's."""
    for rank, result in enumerate(results):
        for key, value in reference["state"].items():
            if rank == 0 or "running" not in key:
                assert compare(result["state"][key], value), (key, rank)
        assert compare(torch.tensor(result["losses"]), torch.tensor(reference["losses"][rank])), rank
