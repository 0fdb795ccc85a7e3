"""Evaluations whose shares have different numbers of batches, under strategies whose forward communicates."""

import functools
import os

import pytest
import torch
from parity import world
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training import build

from torchhal import Module, Trainer

pytestmark = pytest.mark.timeout(170)


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.seen = 0

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = torch.relu(layer(x)) + x
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[0][:, :1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen += len(batch[0])
        if batch_idx % 2:  # not every batch takes the same way
            self.layers[2](batch[0])
        self.log("value", self(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Shares(IterableDataset):
    """Five samples on rank 0, none on others, and nobody knows how many."""

    def __iter__(self):
        return iter(samples(5) if os.environ["RANK"] == "0" else ())


def samples(count):
    return TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(0))[:count])


@functools.lru_cache
def plain():
    return evaluate("single_device", 1)


def evaluate(strategy, devices, arguments=None):
    """(samples that this rank has seen, the value that was logged or all predictions) of each evaluation."""

    def trainer(**options):
        return Trainer(
            accelerator="cpu", devices=devices, strategy=build(strategy, arguments), logger=False, max_epochs=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=-1,
            **options,
        )  # fmt: skip

    found, module = [], Net()
    for name, count in (("validate", 9), ("predict", 9), ("test", 1)):
        module.seen = 0
        (*result,) = getattr(trainer(), name)(module, DataLoader(samples(count), 2))
        found.append((module.seen, torch.cat(result) if name == "predict" else result[0]["value"]))
    module.seen = 0
    fit = trainer()
    fit.fit(module, DataLoader(samples(16), 8 // devices), [DataLoader(samples(count), 2) for count in (9, 3)])
    found.append((module.seen, torch.stack([fit.callback_metrics[f"value/dataloader_idx_{i}"] for i in range(2)])))
    if devices > 1:
        module.seen = 0
        (metrics,) = trainer().validate(module, DataLoader(Shares(), 2))
        found.append((module.seen, metrics["value"]))
    else:
        found.append((5, trainer().validate(module, DataLoader(samples(5), 2))[0]["value"]))
    return found


@pytest.mark.parametrize(
    "alias, size, arguments", [("zero2", 2, None), ("zero3", 2, None), ("hybrid", 4, {"data": 2, "shard": 2})]
)
def test_every_sample_once_and_nothing_twice(request, alias, size, arguments):
    expected = plain()
    ranks = world(request, size).run(evaluate, alias, size, arguments, timeout=120)
    for index, (seen, value) in enumerate(expected):
        assert sum(found[index][0] for found in ranks) == seen
        for found in ranks:
            torch.testing.assert_close(found[index][1], value, rtol=1e-4, atol=1e-5)
