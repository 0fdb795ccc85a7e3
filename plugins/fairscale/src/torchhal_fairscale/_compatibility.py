"""Refuse models and optimizers that compute with what a rank hasn't got, before a step, with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

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


def check_none_ignored(module: nn.Module, optimizers: Sequence[Optimizer], alias: str) -> None:
    """Raise ModelError where an optimizer has parameters that DistributedDataParallel was told to ignore.

    One rank steps each parameter and sends it to the others, whose own values would be overwritten.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    stepped = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    names = [name for name, each in module.named_parameters(remove_duplicate=False) if name in ignored]
    found = [name for name in names if module.get_parameter(name) in stepped]
    if found:
        raise ModelError(
            f"{', '.join(map(repr, found[:3]))}{' and others' if len(found) > 3 else ''} of {type(module).__name__} "
            "was given to DistributedDataParallel to ignore (_set_params_and_buffers_to_ignore_for_model), and under "
            f"strategy {alias!r} the rank that steps a parameter sends it to all: use strategy='ddp', or leave it out "
            "of the optimizer"
        )
