from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from habana_frameworks.torch.core.step_closure import _mark_step_if_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ._gradients import with_gradients


class FusedAdagrad(Optimizer):
    """Adagrad with the count of steps in the group.

    Beside it is the learning rate that it was made with: the group's own ``lr`` has no effect.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "initial_accumulator_value": initial_accumulator_value})
        for group in self.param_groups:
            group["lr_t"] = torch.tensor([lr], requires_grad=False).to("hpu")
            group["step_t"] = torch.tensor([0], dtype=torch.int32).to("hpu")
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, initial_accumulator_value)
        _mark_step_if_lazy()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            rate = group["lr_t"] / (1 + group["step_t"] * group["lr_decay"])
            group["step_t"] += 1
            with torch.no_grad():
                for parameter in with_gradients(group, "FusedAdagrad"):
                    assert parameter.grad is not None
                    gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
                    total = self.state[parameter]["sum"].addcmul_(gradient, gradient)
                    parameter.sub_(rate * gradient / total.sqrt().add_(group["eps"]))
            _mark_step_if_lazy()
        return loss
