"""A training loop without a Trainer: ``raw_loop.py OUT STRATEGY DEVICES``. Each rank writes OUT/rank<r>.pt."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

from torchhal.resolve import Request, resolve


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.body(x), y)


def data():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(10, 8, 6, generator=generator)
    return list(zip(x, (x.sum(2) > 0).long(), strict=True))


def train(strategy, out):
    strategy.setup_environment()
    try:
        model = Net(seed=strategy.global_rank)
        strategy.connect(model)
        strategy.setup_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        strategy.setup_optimizers([optimizer])
        training_step = strategy.step_function("training_step")
        losses = []
        for index, batch in enumerate(data()):
            share = tuple(part[strategy.global_rank :: strategy.world_size] for part in batch)
            loss = training_step(strategy.batch_to_device(share), index)
            strategy.backward(loss)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(strategy.reduce(loss.detach()).item())
        state = strategy.module_state_dict()
        torch.save({"state": state, "losses": losses}, os.path.join(out, f"rank{strategy.global_rank}.pt"))
        strategy.barrier("saved")
        return losses
    finally:
        strategy.teardown()


if __name__ == "__main__":
    out, name, devices = sys.argv[1:]
    strategy = resolve(
        Request(accelerator=os.environ.get("CORE_TESTS_ACCELERATOR", "cpu"), strategy=name, devices=int(devices))
    ).build()
    losses = strategy.make_launcher().launch(train, strategy, out)
    print(losses)
