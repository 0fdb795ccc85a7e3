"""Callbacks that change weights or optimizers, where both are divided among ranks."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Trainer
from torchhal.errors import ConfigurationError
from torchhal.trainer.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LambdaCallback,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)

ROWS = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    tensor_parallel_plan = {"backbone.0": "colwise", "backbone.2": "rowwise"}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, batch):
        return self.head(self.backbone(batch))

    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=0.1)


def fit(strategy, callbacks, ckpt_path=None, plugins=None):
    model = Net()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=callbacks, max_epochs=4, plugins=plugins,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(ROWS, 4), DataLoader(ROWS, 8), ckpt_path=ckpt_path)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fit_twice(folder, strategy, make, plugins):
    """Train, with a checkpoint on the way, and continue from that."""
    path = f"{folder}/{strategy}.ckpt"

    def save(trainer, module, *args):
        if trainer.global_step == 5:
            trainer.save_checkpoint(path)

    callback = {"ema": lambda: EMAWeightAveraging(decay=0.5), "backbone": lambda: BackboneFinetuning(1)}[make]
    whole = fit(strategy, [callback(), LambdaCallback(on_train_batch_end=save)], plugins=plugins)
    return whole, fit(strategy, [callback()], ckpt_path=path, plugins=plugins)


@pytest.mark.parametrize("make", ["ema", "backbone"])
@pytest.mark.parametrize(
    ("strategy", "plugins"),
    [
        ("zero3", None),
        ("zero3", ["dcp"]),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in ("zero1", "zero2", "hybrid")),
    ],
)
def test_trains_as_ddp_and_continues(world2, tmp_path, strategy, plugins, make):
    """Each rank averages its shards, and adds its shards to the optimizer."""
    (whole, again), (other, _) = world2.run(fit_twice, str(tmp_path), strategy, make, plugins)
    (ddp, _), _ = world2.run(fit_twice, str(tmp_path), "ddp", make, None)
    for name, value in whole.items():
        assert torch.equal(value, again[name]) and torch.equal(value, other[name])
        torch.testing.assert_close(value, ddp[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "tensor_parallel"])
def test_averages_parts_of_layers_and_stages(world2, tmp_path, strategy):
    (whole, again), (other, _) = world2.run(fit_twice, str(tmp_path), strategy, "ema", None)
    assert all(torch.equal(whole[name], again[name]) and torch.equal(whole[name], other[name]) for name in whole)


def refuse(strategy):
    said = []
    for callback in (StochasticWeightAveraging(0.1), OnExceptionCheckpoint(".")):
        try:
            fit(strategy, [callback])
        except ConfigurationError as error:
            said.append(str(error))
    return said


def test_refuses_what_needs_whole_weights(world2):
    (average, save), _ = world2.run(refuse, "zero3")
    assert "StochasticWeightAveraging can't average parameters that strategy 'zero3' shards" in average
    assert "OnExceptionCheckpoint can't save when a rank has failed: strategy 'zero3' divides the state" in save
