"""Make precisions by alias, and train a small net with them in the order of the contract."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import hardware
import torch
from torch import nn

from torchhal.precision import MixedPrecision, Precision
from torchhal.registry import _builtin as builtin

ALIASES = {component.alias: component for component in builtin.torchhal_precisions()}


def make(alias: str, **more: Any) -> Any:
    component = ALIASES[alias]
    module, _, name = component.target.partition(":")
    precision = getattr(importlib.import_module(module), name)(**component.defaults, **more)
    precision.setup(hardware.accelerator(), hardware.device())
    return precision


def scaling(init_scale: float = 2.0**10, **options: Any) -> MixedPrecision:
    return make("16-mixed", scaler=torch.amp.GradScaler(hardware.name(), init_scale=init_scale, **options))


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def data(n: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    xs = torch.randn(n, rows, 6, generator=generator, device="cpu").to(hardware.device())
    return [(x, (x.sum(1, keepdim=True) / 3).sin()) for x in xs]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def run(
    precision: Precision, model: nn.Module, optimizer: Any, batches: Any, clip: float | None = None
) -> list[torch.Tensor]:
    """Take optimizer steps in the order of the contract, and return the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with precision.forward_context():
            loss = loss_of(model, precision.convert_input(batch))
        precision.backward(loss)
        if clip is not None:
            precision.unscale_gradients(optimizer)
            precision.clip_gradients(optimizer, clip)
        precision.optimizer_step(optimizer)
        losses.append(precision.convert_output(loss.detach()))
    return losses


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def half_gradients(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Return true gradients under float16 autocast; float64 would differ, powers of two as scales don't."""
    model = copy.deepcopy(model)
    with torch.autocast(hardware.name(), torch.float16):
        loss = loss_of(model, batch)
    (loss * 2.0**10).backward()
    return [p.grad / 2.0**10 for p in model.parameters()]


def scaled_backward(precision: MixedPrecision, model: nn.Module, batch: Any, factor: float = 1.0) -> None:
    with precision.forward_context():
        loss = loss_of(model, batch)
    precision.backward(loss * factor)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
