"""In a rank of a test's world: train small models that an engine must train as ``ddp`` does."""

import os
from datetime import timedelta

import torch
from parity_models import Perceptron
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from torchhal import Trainer

QUIET = {
    "accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


def fit(strategy, model, *, batch=4, **options):
    """Train and return the weights, with the losses of this rank."""
    options = {"max_epochs": 2, "enable_checkpointing": False, **options}
    trainer = Trainer(strategy=strategy, **{**QUIET, **options})
    trainer.fit(model, DataLoader(model.dataset(), batch_size=batch))
    return {"state": {name: value.clone() for name, value in model.state_dict().items()}, "losses": model.losses}


def error_of(run, *args, **options):
    """Call ``run``, and return the error."""
    try:
        run(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Manual(Perceptron):
    """Two optimizers by hand, each over its own layers; every second step accumulates over two backward passes."""

    automatic_optimization = False
    clip_by = None

    def training_step(self, batch, batch_idx):
        for turn, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            for _ in range(1 + (batch_idx + turn) % 2):
                loss = self.loss(batch)
                self.manual_backward(loss)
            if self.clip_by is not None:
                self.clip_gradients(optimizer, self.clip_by)
            optimizer.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self):
        first, rest = self.body[0].parameters(), self.body[1:].parameters()
        return [torch.optim.Adam(first, lr=1e-2), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


class Unused(Perceptron):
    """A layer that no rank uses, with weight decay, and one that rank 1 alone uses in some steps."""

    def build(self):
        self.idle, self.seldom = nn.Linear(4, 4), nn.Linear(4, 4)
        return super().build()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        if self.trainer.global_rank == 1 and batch_idx % 2:
            logits = self.seldom(logits)
        loss = F.cross_entropy(logits, batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Alternating(Perceptron):
    """Freezes and unfreezes layers from epoch to epoch."""

    def on_train_epoch_start(self):
        self.body[0].requires_grad_(self.current_epoch % 2 == 0)
        self.body[2].requires_grad_(self.current_epoch != 1)


class FrozenInTheMiddle(Perceptron):
    """Unfreezes a layer between two batches."""

    def on_train_batch_start(self, batch, batch_idx):
        self.body[2].requires_grad_(batch_idx > 2)

    def on_train_start(self):
        self.body[2].requires_grad_(False)


class ReadsBuffers(Perceptron):
    """Centres its input with a running mean, which training updates and reads, and has a batch norm."""

    def build(self):
        self.register_buffer("center", torch.zeros(64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        if self.training:
            self.steps += 1 + self.trainer.global_rank
            self.center.lerp_(x.detach().mean(0), 1 / (1 + float(self.steps)))
        return self.body(x - self.center)

    def validation_step(self, batch, batch_idx):
        self.losses.append(float(F.cross_entropy(self(batch[0]), batch[1])))

    def val_dataloader(self):
        return DataLoader(self.dataset(), batch_size=4)


def one_batch_more(strategy):
    """Train with a batch more on rank 0; return the error."""
    strategy.timeout = timedelta(seconds=4)
    model = Perceptron()
    batches = [part for number, part in enumerate(DataLoader(model.dataset(), batch_size=8)) if number < 3]
    if os.environ["RANK"] == "0":
        batches.append(batches[0])
    options = {**QUIET, "max_epochs": 1, "enable_checkpointing": False, "use_distributed_sampler": False}
    return error_of(Trainer(strategy=strategy, **options).fit, model, batches)


def error_of_one_rank(strategy):
    """Raise on rank 1 while rank 0 averages; return the error of each."""
    model = Perceptron()

    def fail(batch, batch_idx):
        if model.trainer.global_rank == 1 and batch_idx == 1:
            raise ValueError("the cause")
        return Perceptron.training_step(model, batch, batch_idx)

    model.training_step = fail
    return error_of(fit, strategy, model)
