"""The trial of an optimizer finds what looks at a parameter as a whole, and leaves the user's objects as they are."""

import random

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchhal.accelerators import CPUAccelerator
from torchhal.errors import ConfigurationError
from torchhal_colossalai._compatibility import check_elements


class ByElements(torch.optim.SGD):
    """SGD from elsewhere, which keeps what it does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps, self.seen = 0, []

    def step(self, closure=None):
        self.steps += 1
        self.seen.append(len(self.param_groups[0]["params"]))
        torch.rand(3), random.random()
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Wraps another, of which it has the groups and the state."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.slow = {each: each.detach().clone() for group in base.param_groups for each in group["params"]}

    def step(self, closure=None):
        self.base.step()


class Rows(torch.optim.SGD):
    """Centres the gradient of each row of a matrix."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        centred = each.grad - each.grad.mean(-1, keepdim=True) if each.dim() > 1 else each.grad
                        each.add_(centred, alpha=-group["lr"])


def tried(optimizer):
    return check_elements(optimizer, "colossalai_zero1", CPUAccelerator(), torch.device("cpu"))


def layer(*, dtype=torch.float32):
    module = nn.Conv2d(2, 3, 2, dtype=dtype)
    module.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
    module.empty = nn.Parameter(torch.empty(0, 3, dtype=dtype))
    for each in module.parameters():
        each.grad = torch.ones_like(each)
    return module


def values(module):
    return [value.clone() for each in module.parameters() for value in (each.detach(), each.grad)]


@pytest.mark.parametrize("kind", ["of-its-own", "wrapped", "in-a-list"])
def test_the_users_objects_stay_as_they_are(kind):
    module = layer()
    base = ByElements(module.parameters(), lr=0.1, momentum=0.9)
    optimizer = base
    if kind != "of-its-own":
        optimizer = Lookahead(base)
    if kind == "in-a-list":
        optimizer.bases = [base]
    base.step()
    before, steps, seen = values(module), base.steps, list(base.seen)
    momentum = [base.state[each]["momentum_buffer"].clone() for each in module.parameters()]
    tried(optimizer)
    assert all(map(torch.equal, values(module), before))
    assert (base.steps, base.seen) == (steps, seen)
    assert list(base.state) == list(module.parameters())
    for parameter, value in zip(module.parameters(), momentum, strict=True):
        assert torch.equal(base.state[parameter]["momentum_buffer"], value)


@pytest.mark.parametrize("is_wrapped_again", [False, True])
def test_hooks_of_the_users_optimizer_do_not_run(is_wrapped_again, monkeypatch):
    """Torch wraps a step once more, with the same hooks, where somebody has replaced a class's step by another."""
    called = []
    if is_wrapped_again:
        step = ByElements.step

        def replaced(self, closure=None):
            return step(self, closure)

        monkeypatch.setattr(ByElements, "step", replaced)
    optimizer = ByElements(layer().parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: called.append("own"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: called.append("all"))
    try:
        tried(optimizer)
    finally:
        everywhere.remove()
    assert not called


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [0.1, 0.0, torch.tensor(0.0)], ids=["lr", "zero", "tensor"])
def test_sees_more_than_elements(dtype, lr):
    with pytest.raises(ConfigurationError, match="Rows looks at all elements of a parameter together"):
        tried(Rows(layer(dtype=dtype).parameters(), lr=lr))
    tried(ByElements(layer(dtype=dtype).parameters(), lr=lr))


class OwnStep(torch.optim.SGD):
    """Steps each parameter by a method of a subclass."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.step_one(group, each)


class DecaysMatrices(OwnStep):
    """Decays weights and no biases, by a hundred-thousandth in a step."""

    def step_one(self, group, each):
        if each.dim() > 1:
            each.mul_(1 - group["lr"] * 1e-3)
        each.sub_(each.grad, alpha=group["lr"])


class BelowAThreshold(OwnStep):
    """Takes smaller steps where a gradient's norm is in some range."""

    def step_one(self, group, each):
        each.sub_(each.grad * (0.1 if 0.01 < each.grad.norm() < 0.9 else 1.0), alpha=group["lr"])


class ByFanIn(OwnStep):
    """Divides the learning rate by the length of the last dimension, as of whole matrices."""

    def step_one(self, group, each):
        if each.dim():
            each.sub_(each.grad, alpha=group["lr"] / each.shape[-1])


@pytest.mark.parametrize("kind", [DecaysMatrices, BelowAThreshold, ByFanIn])
def test_sees_what_changes_little_or_seldom(kind):
    with pytest.raises(ConfigurationError, match="looks at all elements of a parameter together"):
        tried(kind((each for each in layer().parameters() if each.dim() != 1), lr=1e-2))


class TrustsLater(OwnStep):
    """Goes by the norm of each parameter from the twentieth step on."""

    def step_one(self, group, each):
        state = self.state[each]
        state["step"] = state.get("step", 0) + 1
        ratio = each.norm() / (each.grad.norm() + 1e-6) if state["step"] > 20 else 1.0
        each.sub_(each.grad * ratio, alpha=group["lr"])


def test_sees_what_begins_later_before_that_step():
    optimizer = TrustsLater(layer().parameters(), lr=1e-2)
    trial, drawn = tried(optimizer), torch.get_rng_state()
    for _ in range(15):
        trial.before_step()
    with pytest.raises(ConfigurationError, match="TrustsLater looks at all elements of a parameter together"):
        trial.before_step()
    assert torch.equal(torch.get_rng_state(), drawn)


def test_one_that_keeps_a_list_beside_its_groups_is_refused():
    def step(self, closure=None):
        for each, slow in self.slow.items():
            each.data.lerp_(slow, 0.5)

    kind = type("Slow", (Lookahead,), {"step": step})
    with pytest.raises(ConfigurationError, match="Slow failed when it was tried on a part of a parameter"):
        tried(kind(ByElements(layer().parameters(), lr=0.1)))
