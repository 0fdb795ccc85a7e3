"""Make an optimizer's state before its first step: peers exchange it, so all must have the same tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

_FIRST = {"step": 0.0, "mu_product": 1.0}
"""What a step changes even when all gradients are zero, and its value before."""


@torch.no_grad()
def make_state(optimizer: Optimizer) -> None:
    """Give ``optimizer`` the state that it would make in its first step; one that has state already keeps it.

    Optimizers make their state in that step only. It is run with gradients of zero and without weight decay, then
    parameters, gradients and counters are put back: the next step does what a first one does.
    """
    if any(optimizer.state.values()):
        return
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]
    before = [parameter.detach().clone() for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters]
    decays: list[tuple[dict[str, Any], Any]] = []
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            decays.append((group, group["weight_decay"]))
            group["weight_decay"] = 0.0
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for parameter, value, gradient in zip(parameters, before, gradients, strict=True):
            parameter.copy_(value)
            parameter.grad = gradient
        for group, decay in decays:
            group["weight_decay"] = decay
    for state in optimizer.state.values():
        for name in _FIRST.keys() & state.keys():
            if isinstance(state[name], torch.Tensor):
                state[name].fill_(_FIRST[name])
            else:
                state[name] = type(state[name])(_FIRST[name])
