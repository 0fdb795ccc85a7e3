"""A range test and a batch-size search by strategies that divide the model, before a fit and after one."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer
from torchhal.tuning import find_batch_size, find_learning_rate

pytestmark = pytest.mark.timeout(170)

X = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Deep(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        widths = [8, 16, 16, 1]
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if len(x) > 40 and self.trainer.global_rank == 1:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def tuned(strategy):
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Deep()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for _ in range(2):
        rates = find_learning_rate(trainer, model, DataLoader(DATA, 8), min_lr=1e-3, max_lr=0.05, num_steps=12)
        losses.append(rates.loss)
        trainer.fit(Deep(), DataLoader(DATA, 8))
    size = find_batch_size(trainer, model, DataLoader(DATA, 8), start=32)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return losses, size


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_equals_ddp(world2, strategy):
    ((expected, _), _), _ = world2.run(tuned, "ddp", timeout=90)
    (losses, size), other = world2.run(tuned, strategy, timeout=90)
    assert (losses, size) == other and size == 32
    for measured in losses:
        if strategy == "pipeline":  # its ranks share each batch
            assert measured[0] == pytest.approx(mse_loss(Deep()(X[:8]), DATA[:8][1]).item(), rel=1e-4)
        else:
            assert measured == pytest.approx(expected, rel=1e-4)
