"""Refuse models and optimizers that Colossal-AI's ZeRO can't train, before a batch, with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.accelerators import Accelerator
from torchhal.errors import ConfigurationError, ModelError
from torchhal.strategies.model_checks import (
    check_dense_gradients,
    check_disjoint_optimizers,
    check_disjoint_storage,
    check_no_closure,
)
from torchhal.trainer.loops import module_hook
from torchhal_colossalai._divided_tensors import is_divided
from torchhal_colossalai._element_trial import DDP, ElementTrial, looks_at_whole_parameters


def check_trainable(module: nn.Module, optimizers: Sequence[Optimizer], alias: str, stage: int) -> None:
    """Raise an error for what would fail in the midst of training, or train something else.

    Args:
        module: the whole model.
        optimizers: what its ``configure_optimizers`` returned.
        alias: of the strategy.
        stage: of ZeRO.
    """
    model, named = type(module).__name__, dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    divides = f"strategy {alias!r} divides the elements of each parameter among the ranks"
    check_dense_gradients(module, divides, f"set it to False, or {DDP}")
    check_disjoint_optimizers(module, optimizers, divides, f"give each to one optimizer, or {DDP}")
    check_disjoint_storage(module, f"{divides}, in memory of its own", f"make them one parameter, or {DDP}")
    for optimizer in optimizers:
        check_no_closure(optimizer, divides, f"{DDP}, or another optimizer", error=ConfigurationError)
        check_no_step_pre_hooks(module, optimizer, stage)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for parameter in parameters:
            if parameter.is_complex():
                raise ModelError(
                    f"{names.get(id(parameter), 'a parameter')!r} of {model} is complex, and Colossal-AI's ZeRO "
                    f"computes the norm of real gradients: train its real view, or {DDP}"
                )
        dtypes = {parameter.dtype for parameter in parameters if is_divided(parameter)}
        if len(dtypes) > 1:
            first = next(each for each in parameters if is_divided(each))
            other = next(each for each in parameters if is_divided(each) and each.dtype is not first.dtype)
            raise ModelError(
                f"{names.get(id(other), 'a parameter')!r} of {model} is {other.dtype} and "
                f"{names.get(id(first), 'a parameter')!r} is {first.dtype}, and Colossal-AI's ZeRO sends the weights "
                f"of an optimizer in one dtype: convert them, give each dtype an optimizer, or {DDP}"
            )
    if stage == 2 and module_hook(module, "configure_gradient_clipping") is not None:
        raise ModelError(
            f"{model}.configure_gradient_clipping would never see a gradient, for at stage 2 each rank has a part of "
            "it: use Trainer(gradient_clip_val=...), stage 1, or strategy='ddp'"
        )


def check_no_step_pre_hooks(module: Any, optimizer: Optimizer, stage: int) -> None:
    """Raise ModelError, at stage 2, for a hook that runs before the optimizer's step: it would see no gradient."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if stage == 2 and hooks:
        hook = next(iter(hooks.values()))
        raise ModelError(
            f"{getattr(hook, '__qualname__', hook)!r} is registered to run before the step of "
            f"{type(optimizer).__name__} of {type(module).__name__}, and it would never see a gradient, for at stage 2 "
            "each rank has a part of it: use Trainer(gradient_clip_val=...) to clip, stage 1, or strategy='ddp'"
        )


_OF_TORCH = (torch.optim.Adafactor, *((torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()))
"""Optimizers of torch's that look at all elements of a parameter together."""


def check_elements(
    optimizer: Optimizer, alias: str, accelerator: Accelerator, device: torch.device
) -> ElementTrial | None:
    """Raise ConfigurationError for an optimizer whose step on one element depends on others of the parameter.

    Those of torch are known; one from elsewhere is tried on tensors of a few elements, as a whole and divided. Returns
    the object that tries its later steps.
    """
    if isinstance(optimizer, _OF_TORCH):
        raise looks_at_whole_parameters(type(optimizer).__name__, alias)
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return None
    return ElementTrial(optimizer, alias, accelerator, device)
