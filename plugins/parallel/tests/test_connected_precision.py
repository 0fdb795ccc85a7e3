"""A module that a precision's ``connect`` puts around the model is what each training step runs through."""

import pytest
import staged
import torch
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Trainer
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import SinglePrecision

pytestmark = pytest.mark.timeout(120)


class Scaled(nn.Module):
    """Halves what goes in, and triples what comes out."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch, *rest):
        return 3 * self.inner((batch[0] / 2, batch[1]), *rest)


class Scales(SinglePrecision):
    def connect(self, model=None, optimizers=(), lr_schedulers=()):
        return Scaled(model), optimizers, lr_schedulers


class Penalized(staged.Stack):
    """Runs a backward inside of its step."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + slope.square().mean()


MODELS = {"Stack": staged.Stack, "Penalized": Penalized}


def trained(strategy, name="Stack", devices=1):
    """The weights after a fit."""
    module = MODELS[name]()
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, plugins=[Scales()], max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(staged.samples(), staged.BATCH // devices)
    trainer.fit(module, loader, loader)
    return {name: value.clone() for name, value in module.state_dict().items()}


def plain(name):
    """Those of a plain loop that halves and triples."""
    module = MODELS[name]()
    module.log = lambda *args, **options: None
    optimizer = module.configure_optimizers()
    for x, y in DataLoader(staged.samples(), staged.BATCH):
        optimizer.zero_grad()
        (3 * module.training_step((x / 2, y), 0)).backward()
        optimizer.step()
    return module.state_dict()


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero2", "zero3", "tensor_parallel", "pipeline", "hybrid"])
def test_a_training_step_runs_through_it(strategy, name):
    same(trained(strategy, name), plain(name))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_training_step_runs_through_it_on_two_ranks(world2, strategy):
    for found in world2.run(trained, strategy, "Penalized", 2):
        same(found, plain("Penalized"))


def refusal(strategy):
    """What a fit says before its first step."""
    try:
        trained(strategy, devices=2)
    except UnsupportedCombinationError as error:
        return str(error)


def test_under_a_pipeline_it_is_refused(world2):
    for said in world2.run(refusal, "pipeline"):
        assert "Scales.connect gives back a Scaled for the model" in said and "'pipeline'" in said
