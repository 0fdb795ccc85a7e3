from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from habana_frameworks.torch.core.step_closure import _mark_step_if_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ._gradients import with_gradients


class _Required:
    def __repr__(self) -> str:
        return "required"


required: Any = _Required()


class FusedSGD(Optimizer):
    """SGD whose momentum starts from zero: with ``dampening`` the first step is damped, too."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = required,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "dampening": dampening, "nesterov": nesterov})
        _mark_step_if_lazy()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            _mark_step_if_lazy()
            momentum = group["momentum"]
            with torch.no_grad():
                for parameter in with_gradients(group, "FusedSGD"):
                    assert parameter.grad is not None
                    update = parameter.grad.add(parameter, alpha=group["weight_decay"])
                    if momentum:
                        state = self.state[parameter]
                        if "momentum_buffer" not in state:
                            state["momentum_buffer"] = torch.zeros_like(parameter)
                        buffer = state["momentum_buffer"].mul_(momentum).add_(update, alpha=1 - group["dampening"])
                        update = update.add(buffer, alpha=momentum) if group["nesterov"] else buffer
                    parameter.sub_(update, alpha=group["lr"])
            _mark_step_if_lazy()
        return loss
