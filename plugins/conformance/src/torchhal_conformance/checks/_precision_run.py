"""Set up a precision with a small model and an optimizer, for the checks of precisions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from torchhal.precision import Precision
from torchhal.pytree import move_module
from torchhal_conformance._assertions import close
from torchhal_conformance._check import NotApplicable
from torchhal_conformance._context import CheckContext

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}


class PrecisionRun:
    """A precision that is set up, with a model and an optimizer under it."""

    def __init__(self, context: CheckContext, make: Callable[..., Optimizer] = torch.optim.SGD, **options: Any) -> None:
        self.accelerator, self.device = context.setup_accelerator()
        self.precision: Precision = context.create()
        self.precision.setup(self.accelerator, self.device)
        # zero at the start: after one step of SGD at lr=1 the weights are the gradient that was applied
        self.model: Any = nn.Linear(4, 3)
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        self.model = self.precision.convert_module(self.model)
        move_module(self.model, self.device)
        optimizer = make(self.model.parameters(), **{"lr": 1.0, **options})
        self.model, (self.optimizer,), _ = self.precision.connect(self.model, [optimizer], [])
        generator = context.generator()
        self.batch = [torch.randn(8, n, generator=generator).to(self.device) for n in (4, 3)]
        self.tolerance = TOLERANCE.get(self.precision.compute_dtype, 3e-2)

    def loss(self, batch: Any = None, model: nn.Module | None = None) -> torch.Tensor:
        x, y = self.precision.convert_input(self.batch if batch is None else batch)
        with self.precision.forward_context():
            output = (model or self.model)(x)
            wide = output if output.dtype in (torch.float32, torch.float64) else output.float()
            loss = F.mse_loss(wide, y.to(wide.dtype)) / 4  # small enough for float16 at the usual first scale
        converted: torch.Tensor = self.precision.convert_output(loss)
        return converted

    def reference(self, batch: Any = None) -> list[torch.Tensor]:
        """Return the gradients that plain autograd computes for the same forward."""
        model = copy.deepcopy(self.model)
        loss = self.loss(batch, model)
        return [g.detach().cpu().double() for g in torch.autograd.grad(loss, list(model.parameters()))]

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.detach().cpu().double() for p in self.model.parameters() if p.grad is not None]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().cpu().double().clone() for p in self.model.parameters()]

    def step(self, batch: Any = None, clip: tuple[float, str] | None = None) -> bool:
        """Make one whole optimizer step and return True unless it was skipped."""
        self.optimizer.zero_grad()
        self.precision.backward(self.loss(batch))
        self.precision.unscale_gradients(self.optimizer)
        if clip is not None:
            self.precision.clip_gradients(self.optimizer, *clip)
        return self.precision.optimizer_step(self.optimizer)

    def scale(self) -> float:
        """Return the factor by which backward multiplies gradients, and clear them."""
        reference = flatten(self.reference())
        self.optimizer.zero_grad()
        self.precision.backward(self.loss())
        found = float(flatten(self.gradients()) @ reference / (reference @ reference))
        self.optimizer.zero_grad()
        return found

    def near(self, what: str, got: Any, expected: Any, factor: float = 1.0) -> None:
        """Fail unless the difference is small beside the greatest expected value."""
        got, expected = (torch.as_tensor(value).detach().cpu().double() for value in (got, expected))
        unit = float(expected.abs().max()) or 1.0
        close(f"{what} (in units of {unit:.4g})", got / unit, expected / unit, factor * self.tolerance)

    def require_scaling(self) -> None:
        """Raise NotApplicable unless the loss is scaled."""
        if abs(self.scale() - 1) < 1e-2:
            raise NotApplicable("this precision doesn't scale the loss")

    def overflow_gradients(self) -> None:
        """Compute infinite or NaN gradients through the precision's own backward."""
        self.precision.backward(self.loss() * float("inf"))


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors])


def total_norm(tensors: list[torch.Tensor]) -> float:
    return float(flatten(tensors).norm())
