"""Backward passes inside a step, as of a gradient penalty, are right under every strategy, or refused."""

import pytest
import torch
import training
from parameter_models import outcome
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module

pytestmark = pytest.mark.timeout(120)


def final(name, strategy, devices):
    """The weights of a model of this file after a fit, or (the error's name, its words)."""
    return outcome(globals()[name], strategy, devices)


class Critic(Module):
    """A gradient penalty (WGAN-GP): the norm of the gradient by the input is differentiated once more."""

    def __init__(self, penalty=True):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(10, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_(True)
        score = self(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        self.seen = self.last.bias.detach().clone()
        return score.square().mean() + 3 * (gradient.norm(dim=1) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Forces(Critic):
    """The gradient by the input is itself the loss, as of an energy; the layers are used again after it."""

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_(True)
        (force,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return (force - 1).square().mean() + 0.1 * self(x.detach()).square().mean()


class Linear(Forces):
    """The graph of the gradient is one of its own: no gradient of it passes a layer's forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class OncePerStep(Critic):
    """A gradient without a graph, in the midst of the step."""

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_(True)
        (gradient,) = torch.autograd.grad(self(x).sum(), x)
        return self(x.detach() + 0.1 * gradient).square().mean()


def penalised(strategy, devices, name):
    trainer = training.small(strategy, devices, max_epochs=3)
    module = globals()[name]()
    samples = torch.randn(16, 6, generator=torch.Generator().manual_seed(5))
    try:
        trainer.fit(module, DataLoader(TensorDataset(samples), 4))
    except Exception as error:
        return type(error).__name__, str(error)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("name", ["Critic", "Forces", "Linear", "OncePerStep"])
def test_a_gradient_inside_a_step_may_be_differentiated(world2, strategy, name):
    expected = world2.run(penalised, "ddp", 2, name)[0]
    for found in world2.run(penalised, strategy, 2, name):
        assert isinstance(found, dict), found
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)


class PenaltyThroughPlan(Critic):
    """Late, as a penalty at some steps only is."""

    tensor_parallel_plan = {"first": "colwise", "last": "rowwise"}

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def training_step(self, batch, batch_idx):
        if self.global_step < 2:
            return self(batch[0]).square().mean()
        return super().training_step(batch, batch_idx)


class PenaltyByWeights(PenaltyThroughPlan):
    def training_step(self, batch, batch_idx):
        loss = self(batch[0]).square().mean()
        gradients = torch.autograd.grad(loss, list(self.first.parameters()), create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in gradients)


@pytest.mark.parametrize("name", ["PenaltyThroughPlan", "PenaltyByWeights"])
def test_a_gradient_through_divided_layers_may_not_be_differentiated(world2, name):
    for kind, said in world2.run(penalised, "tensor_parallel", 2, name):
        assert kind == "ModelError", said
        assert "'last'" in said and "create_graph=True" in said and "'tensor_parallel'" in said


class OutsideOfPlan(Critic):
    """The first derivative through divided layers, the second beside them."""

    tensor_parallel_plan = {"first": "colwise_rep"}

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0].requires_grad_(True))
        (gradient,) = torch.autograd.grad(self.last(torch.tanh(x)).sum(), x, create_graph=True)
        (plain,) = torch.autograd.grad(self(batch[0]).sum(), batch[0])
        return (gradient.norm(dim=1) - 1).square().mean() + self(batch[0] + plain).square().mean()


def test_inner_gradients_outside_of_the_plan(world2):
    """Other gradients inside a step are right where layers are divided."""
    expected = penalised("single_device", 1, "OutsideOfPlan")
    for found in world2.run(penalised, "tensor_parallel", 2, "OutsideOfPlan"):
        assert isinstance(found, dict), found
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)
