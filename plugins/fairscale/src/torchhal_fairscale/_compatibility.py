"""Refuse models and optimizers that compute with what a rank hasn't got, before a step, with what to do instead."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ModelError
from torchhal.trainer.loops import module_hook

_INSTEAD = "use Trainer(gradient_clip_val=...), strategy='fairscale_oss' or strategy='ddp'"


def check_no_own_clipping(module: nn.Module, alias: str) -> None:
    """Raise ModelError for a model that clips gradients itself, of which each rank has a share."""
    if module_hook(module, "configure_gradient_clipping") is not None:
        raise ModelError(
            f"{type(module).__name__}.configure_gradient_clipping would see a share of the gradients under strategy "
            f"{alias!r}, another one on each rank, and clip by its norm: {_INSTEAD}"
        )


def check_no_step_hooks(optimizer: Optimizer, alias: str) -> None:
    """Raise ModelError for hooks before an optimizer's step, which may compute with all gradients."""
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        raise ModelError(
            f"{type(optimizer).__name__} has a hook before its step (register_step_pre_hook), which would see a share "
            f"of the gradients under strategy {alias!r}, another one on each rank: {_INSTEAD}"
        )
