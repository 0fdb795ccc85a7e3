"""Define a regression model and its training, by a plain PyTorch loop and by the same loop through a strategy."""

from __future__ import annotations

import contextlib
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from torchhal.strategies import StepResult


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def same_everywhere(strategy, tensors):
    """Assert that tensors are bit for bit the same on all ranks."""
    for name, tensor in tensors.items():
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        everybody = strategy.all_gather(dense)
        for other in everybody[1:]:
            assert torch.equal(everybody[0], other), f"{name} differs between ranks"


class Regression(nn.Module):
    """A body with dropout-free layers whose loss is a mean: the ranks' mean is the joined batch's loss."""

    def __init__(self, seed=0, extra=False):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        if extra:
            self.never_used = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    validation_step = training_step


def batches(count, per_rank, ranks):
    """Return ``count`` global batches; rank r's share of one is rows r*per_rank to (r+1)*per_rank."""
    generator = torch.Generator().manual_seed(1)
    shape = (count, per_rank * ranks)
    return torch.randn(*shape, 6, generator=generator), torch.randn(*shape, 2, generator=generator)


def share(batch, r, per_rank):
    return tuple(part[r * per_rank : (r + 1) * per_rank] for part in batch)


def plain(model, optimizer, global_batches, *, accumulate=1, clip=None):
    """Train by the loop that anybody would write, in one process, on the joined batches."""
    losses = []
    for index, batch in enumerate(zip(*global_batches, strict=True)):
        loss = model.training_step(batch, index)
        losses.append(loss.item())
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train(strategy, model, make_optimizer, global_batches, *, accumulate=1, clip=None):
    """Train by the same loop, every line of it through a strategy."""
    per_rank = global_batches[0].shape[1] // strategy.world_size
    strategy.connect(model)
    strategy.setup_model()
    optimizer = make_optimizer(model.parameters())
    strategy.setup_optimizers([optimizer])
    step = strategy.step_function("training_step")
    paused = strategy.no_backward_sync() or contextlib.nullcontext()
    losses = []
    for index, batch in enumerate(zip(*global_batches, strict=True)):
        last = (index + 1) % accumulate == 0
        mine = strategy.batch_to_device(share(batch, strategy.global_rank, per_rank))
        with contextlib.nullcontext() if last else paused:
            loss = step(mine, index)
            losses.append(strategy.reduce(loss.detach(), "mean").item())
            strategy.backward(loss / accumulate)
        if last:
            if clip is not None:
                strategy.clip_gradients(optimizer, clip)
            assert strategy.optimizer_step(optimizer) == StepResult.UPDATED
            optimizer.zero_grad()
    return losses


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = partial(torch.optim.Adam, lr=0.01, eps=1e-4)
