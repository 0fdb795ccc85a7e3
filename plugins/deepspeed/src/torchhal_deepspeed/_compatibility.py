"""Refuse models that DeepSpeed's engine can't train, before a batch, with what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError, ModelError
from torchhal.strategies.model_checks import check_dense_gradients, check_no_closure, check_one_optimizer
from torchhal.trainer.loops import module_hook


def only_optimizer(module: nn.Module, optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """Return the one optimizer that there is, or None if there is none.

    Raises:
        ConfigurationError: there are several.
    """
    if not optimizers:
        return None
    instead = "put their parameters into groups of one, or use strategy='ddp'"
    check_one_optimizer(module, optimizers, "DeepSpeed's engine has one optimizer", instead, error=ConfigurationError)
    return optimizers[0]


def check_trainable(module: nn.Module, optimizer: Optimizer | None, stage: int, dtype: torch.dtype) -> None:
    """Raise ModelError for what would fail in the midst of training, or be ignored without an error.

    Args:
        module: the whole model.
        optimizer: the user's; None for one in the configuration.
        stage: of ZeRO.
        dtype: of the weights that compute. Under fp32 the engine converts none; else it converts all.
    """
    model = type(module).__name__
    if optimizer is not None:
        check_no_closure(optimizer, "DeepSpeed's engine evaluates a batch before its step", "use strategy='ddp'")
    if module_hook(module, "configure_gradient_clipping") is not None:
        raise ModelError(
            f"{model}.configure_gradient_clipping would never see a gradient, for DeepSpeed's engine has them in "
            "parts: use Trainer(gradient_clip_val=...), or strategy='ddp'"
        )
    if stage == 0:
        return
    check_dense_gradients(module, "ZeRO divides dense gradients", "set it to False, or use strategy='ddp'")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and dtype is torch.float32 and parameter.dtype is not torch.float32:
            raise ModelError(
                f"{name!r} of {model} is {parameter.dtype}, and ZeRO puts all parameters into one tensor of "
                f"{torch.float32}: convert it with float(), or use strategy='ddp'"
            )


def check_divisible(module: nn.Module) -> None:
    """Raise ModelError for a parameter that stage 3 can't divide."""
    for name, parameter in module.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if not shape or 0 in shape:
            raise ModelError(
                f"{name!r} of {type(module).__name__} has the shape {shape}, which ZeRO stage 3 can't divide: "
                f"{'give it the shape (1,)' if not shape else 'leave it out'}, or use strategy='deepspeed_stage_2'"
            )


def check_statistics(module: nn.Module, dtype: torch.dtype, buffer_dtype: torch.dtype | None) -> None:
    """Raise ModelError for a batch norm whose statistics the device can't mix with its weights.

    The engine gives both their dtypes; some devices can mix them, CPUs can't. This comes before the engine divides
    what would have to be put together again.

    Args:
        module: the whole model.
        dtype: of the weights that compute. Under fp32 the engine converts none; else it converts all.
        buffer_dtype: of the buffers; None leaves them what they are.
    """
    tried: set[tuple[torch.dtype, torch.dtype]] = set()
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            continue
        if layer.weight is None or layer.running_mean is None:
            continue
        weights = layer.weight.dtype if dtype is torch.float32 else dtype
        statistics = buffer_dtype or layer.running_mean.dtype
        if (weights, statistics) in tried:
            continue
        tried.add((weights, statistics))
        device = layer.running_mean.device
        weight = torch.ones(1, dtype=weights, device=device)
        statistic = torch.ones(1, dtype=statistics, device=device)
        try:
            nn.functional.batch_norm(weight[:, None], statistic, statistic, weight, weight)
        except RuntimeError as error:
            kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(weights, "fp32")
            raise ModelError(
                f"{name!r} of {type(module).__name__} would have statistics in {statistics} and weights in {weights}, "
                f"which {device.type!r} can't mix ({error}): convert the buffers with "
                f'config={{"data_types": {{"buffer_dtype": "{kind}"}}}}, or use strategy=\'ddp\''
            ) from error


def trained(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are trained."""
    return frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def check_still_trained(module: nn.Module, before: frozenset[str]) -> None:
    """Raise ModelError where parameters were frozen or unfrozen since the engine began with ``before``."""
    if changed := sorted(trained(module) ^ before):
        name = changed[0]
        done, what = ("frozen", "goes on moving") if name in before else ("unfrozen", "would never train")
        others = f" and {len(changed) - 1} other(s) were" if len(changed) > 1 else " was"
        raise ModelError(
            f"in {type(module).__name__} {name!r}{others} {done} in the midst of a run, which DeepSpeed's engine "
            f"{what}: fit the model anew from a checkpoint, with these parameters as they are to be, or use "
            "strategy='ddp'"
        )


def check_used_alike(module: nn.Module, loss: torch.Tensor, gather: Callable[[Any], Sequence[Collection[str]]]) -> None:
    """Raise ModelError, on every rank alike, if ranks compute their losses with different parameters.

    The engine adds up the gradients of all ranks in the order in which they come. It would add
    gradients of different parameters, without an error.

    Args:
        module: the whole model.
        loss: this rank's, with its graph.
        gather: gives every rank the values of all.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    everybody = gather(sorted(names[key] for key in _reached(loss) if key in names))
    for rank, used in enumerate(everybody):
        if different := sorted(set(used) ^ set(everybody[0])):
            one, other = (rank, 0) if different[0] in used else (0, rank)
            raise ModelError(
                f"rank {one} computes its loss with {different[0]!r} of {type(module).__name__}, and rank {other} "
                "without it: under DeepSpeed all ranks must use the same parameters in every step, for it would mix up "
                "their gradients; use strategy='ddp_find_unused_parameters_true'"
            )


def _reached(loss: torch.Tensor) -> set[int]:
    """Return the identities of the leaves that a backward from ``loss`` gives gradients."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves
