"""Clipping in one operator."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from habana_frameworks.torch.core.step_closure import _mark_step_if_lazy

__all__ = ["FusedClipNorm"]


class FusedClipNorm:
    """Scales gradients to a 2-norm of ``max_norm`` at most, in the dtype of the first parameter."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> None:
        first = next(iter(parameters), None)
        self.dtype = torch.float32 if first is None else first.dtype
        self.max_norm_t = (torch.ones(1) * max_norm).to(self.dtype).to(torch.device("hpu"))

    def clip_norm(self, parameters: Iterable[torch.nn.Parameter] | torch.Tensor) -> torch.Tensor:
        """Return the norm before; shape (1,), or () where nothing has a gradient."""
        _mark_step_if_lazy()
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        if not gradients:
            return torch.tensor(0.0)
        with torch.no_grad():
            norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
            total: torch.Tensor = torch.linalg.vector_norm(norms).to(self.dtype).reshape(1)
            scale = torch.clamp(self.max_norm_t / (total + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.dtype))
        _mark_step_if_lazy()
        return total
