from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from habana_frameworks.torch.core.step_closure import _mark_step_if_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ._gradients import with_gradients


class FusedAdamW(Optimizer):
    """AdamW whose group counts the steps, and whose ``eps`` is added before the bias is corrected."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        moments_dtype: Any = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.moments_dtype = moments_dtype

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            _mark_step_if_lazy()
            parameters = with_gradients(group, "FusedAdamW")
            if not parameters:
                continue
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), rate = group["betas"], group["lr"]
            if group["bias_correction"]:
                rate *= math.sqrt(1 - beta2 ** group["step"]) / (1 - beta1 ** group["step"])
            with torch.no_grad():
                for parameter in parameters:
                    state, gradient = self.state[parameter], parameter.grad
                    assert gradient is not None
                    if not state:
                        dtype = self.moments_dtype or parameter.dtype
                        state.update(
                            step=0,
                            exp_avg=torch.zeros_like(parameter, dtype=dtype),
                            exp_avg_sq=torch.zeros_like(parameter, dtype=dtype),
                        )
                    state["exp_avg"].lerp_(gradient.to(state["exp_avg"].dtype), 1 - beta1)
                    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                    parameter.mul_(1 - group["weight_decay"] * group["lr"])
                    parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-rate)
        _mark_step_if_lazy()
        return loss
