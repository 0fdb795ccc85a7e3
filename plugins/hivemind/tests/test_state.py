"""Optimizer state and learning rates as peers exchange them, against plain PyTorch."""

from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

from torchhal_hivemind._optimizer_state import make_state
from torchhal_hivemind._schedule import Schedule

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "weight_decay": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Adam": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1, "weight_decay": 0.5},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "weight_decay": 0.1},
    "Adadelta": {"lr": 0.1},
    "Rprop": {"lr": 0.1},
    "Adafactor": {"lr": 0.1, "weight_decay": 0.1},
}


def train(name, prepare):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = getattr(torch.optim, name.split()[0])([*model.parameters(), frozen], **OPTIMIZERS[name])
    if prepare:
        make_state(optimizer)
        make_state(optimizer)  # what is there stays
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    assert torch.equal(frozen, torch.ones(3))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_made_before_the_first_step_changes_nothing(name):
    plain, reference = train(name, prepare=False)
    prepared, optimizer = train(name, prepare=True)
    torch.testing.assert_close(prepared, plain, rtol=0, atol=0)
    for ours, theirs in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert {**ours, "params": 0} == {**theirs, "params": 0}


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=9),
    ],
)
@pytest.mark.parametrize("frequency", [1, 2])
def test_a_late_peers_rate_is_that_of_the_others(make, frequency):
    """It takes over an optimizer whose rate has come down already, and must not bring it down twice."""

    def peer():
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1, betas=(0.9, 0.99))
        config = SimpleNamespace(scheduler=make(optimizer), frequency=frequency)
        make_state(optimizer)
        return optimizer, Schedule(optimizer, [config], 0)

    first, schedule = peer()
    for epoch in range(1, 8):
        schedule.follow(epoch, replaced=False)
    late, its = peer()
    its.follow(1, replaced=False)
    late.load_state_dict(first.state_dict())
    its.follow(7, replaced=True)
    for epoch in (8, 9):
        schedule.follow(epoch, replaced=False)
        its.follow(epoch, replaced=False)
    for ours, theirs in zip(late.param_groups, first.param_groups, strict=True):
        assert {**ours, "params": 0} == {**theirs, "params": 0}
    assert first.param_groups[0]["lr"] != 0.1


def test_without_schedulers_the_others_rate_is_taken_over():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = Schedule(optimizer, [], 0)
    optimizer.param_groups[0]["lr"] = 0.05
    schedule.follow(3, replaced=True)
    assert (optimizer.param_groups[0]["lr"], schedule.epoch) == (0.05, 3)
