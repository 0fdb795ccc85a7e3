"""Refuse models, optimizers and schedulers that a strategy can't train, before training.

Each check is for one property that several engines can't work with. A strategy gives its cause as ``reason``, which
begins the message and is continued with "and"::

    strategy 'acme' averages dense gradients, and 'words' has sparse=True: set it to False

``error`` is the class of the error: ModelError unless a strategy calls it an UnsupportedCombinationError.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ModelError, TorchhalError
from torchhal.precision import needs_closure

__all__ = [
    "check_automatic_optimization",
    "check_dense_gradients",
    "check_disjoint_optimizers",
    "check_disjoint_storage",
    "check_metric_schedulers",
    "check_no_closure",
    "check_none_ignored",
    "check_one_optimizer",
    "check_optimized_parameters",
]

_SHOWN = 8  # names of parameters in a message


def check_automatic_optimization(
    module: Any, reason: str, instead: str = "use automatic optimization", *, error: type[TorchhalError] = ModelError
) -> None:
    """Raise an error for a model with ``automatic_optimization=False``.

    Args:
        module: the whole model.
        reason: why this strategy can't train it.
        instead: what to do, to end the message with.
        error: the class of the error.

    .. versionadded:: 0.2
    """
    if not getattr(module, "automatic_optimization", True):
        raise error(f"{reason}, and {type(module).__name__} has automatic_optimization=False: {instead}")


def check_one_optimizer(
    module: Any,
    optimizers: Sequence[Optimizer],
    reason: str,
    instead: str = "put the parameters into groups of one",
    *,
    error: type[TorchhalError] = ModelError,
) -> None:
    """Raise an error unless the model has exactly one optimizer.

    Args:
        module: the whole model.
        optimizers: what its ``configure_optimizers`` returned.
        reason: why this strategy needs one.
        instead: what to do, to end the message with.
        error: the class of the error.

    .. versionadded:: 0.2
    """
    if len(optimizers) != 1:
        name = type(module).__name__
        raise error(f"{reason}, and {name}.configure_optimizers returned {len(optimizers)}: {instead}")


def check_no_closure(
    optimizer: Optimizer,
    reason: str,
    instead: str = "use an optimizer that needs no closure",
    *,
    error: type[TorchhalError] = ModelError,
) -> None:
    """Raise an error for an optimizer that evaluates the model within its step, such as LBFGS.

    Args:
        optimizer: the user's.
        reason: why this strategy can't evaluate a model there.
        instead: what to do, to end the message with.
        error: the class of the error.

    .. versionadded:: 0.2
    """
    if needs_closure(optimizer):
        raise error(f"{reason}, and {type(optimizer).__name__} evaluates the model within a step: {instead}")


def check_dense_gradients(
    module: nn.Module, reason: str, instead: str = "set it to False", *, error: type[TorchhalError] = ModelError
) -> None:
    """Raise an error for an embedding with ``sparse=True``, whose gradients are sparse tensors.

    Args:
        module: the whole model.
        reason: why this strategy can't send or divide them.
        instead: what to do, to end the message with.
        error: the class of the error.

    .. versionadded:: 0.2
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise error(f"{reason}, and {name or type(module).__name__!r} has sparse=True: {instead}")


def check_disjoint_optimizers(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    reason: str,
    instead: str = "give each parameter to one optimizer",
    *,
    error: type[TorchhalError] = ModelError,
) -> None:
    """Raise an error for a parameter that two optimizers have.

    Args:
        module: the whole model.
        optimizers: all of them.
        reason: why this strategy can't let both step it.
        instead: what to do, to end the message with.
        error: the class of the error.

    .. versionadded:: 0.2
    """
    names = {id(each): name for name, each in module.named_parameters()}
    seen: set[int] = set()
    for optimizer in optimizers:
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if shared := [names.get(each, "a parameter") for each in own & seen]:
            raise error(f"{reason}, and two optimizers of {type(module).__name__} have {min(shared)!r}: {instead}")
        seen |= own


def check_disjoint_storage(
    module: nn.Module,
    reason: str,
    instead: str = "make them parameters of their own, or use one parameter in both places",
    *,
    error: type[TorchhalError] = ModelError,
) -> None:
    """Raise an error for two parameters that are views of the same memory.

    Args:
        module: the whole model.
        reason: why this strategy needs parameters in memory of their own.
        instead: what to do, to end the message with.
        error: the class of the error.

    .. versionadded:: 0.2
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, each in module.named_parameters():
        if not (each.numel() and each.layout is torch.strided and not each.is_meta):
            continue
        first = int(each.storage_offset()) * each.element_size()
        extent = sum((int(size) - 1) * int(step) for size, step in zip(each.shape, each.stride(), strict=True)) + 1
        span = (first, first + extent * each.element_size(), name)
        spans.setdefault(each.untyped_storage().data_ptr(), []).append(span)
    for found in spans.values():
        found.sort()
        for (_, end, name), (start, _, other) in pairwise(found):
            if start < end:
                raise error(f"{reason}, and {name!r} and {other!r} are views of the same memory: {instead}")


def check_none_ignored(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    ignored: Collection[str],
    reason: str,
    instead: str = "take it out of the optimizer, or use strategy='ddp'",
    *,
    error: type[TorchhalError] = ModelError,
) -> None:
    """Raise an error for a parameter of an optimizer that each rank is to train by itself.

    Args:
        module: the whole model.
        optimizers: all of them.
        ignored: names of such parameters, as :meth:`.ParallelStrategy.parameters_to_ignore` returns them.
        reason: why this strategy can't leave them to each rank.
        instead: what to do, to end the message with.
        error: the class of the error.

    .. versionadded:: 0.2
    """
    stepped = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    named = module.named_parameters(remove_duplicate=False)
    if found := [name for name, each in named if name in ignored and id(each) in stepped]:
        names = ", ".join(map(repr, found[:_SHOWN]))
        raise error(
            f"{reason}, and each rank is to train {names} of {type(module).__name__} by itself, as "
            f"DistributedDataParallel was told (_set_params_and_buffers_to_ignore_for_model): {instead}"
        )


def check_optimized_parameters(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    reason: str,
    instead: str = "add them, or freeze them with requires_grad_(False)",
    *,
    error: type[TorchhalError] = ModelError,
) -> None:
    """Raise an error for parameters that are trained, ``requires_grad=True``, but are in no optimizer.

    Args:
        module: the whole model.
        optimizers: all of them.
        reason: why this strategy needs them there.
        instead: what to do, to end the message with.
        error: the class of the error.

    .. versionadded:: 0.2
    """
    held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    missing = [name for name, each in module.named_parameters() if each.requires_grad and id(each) not in held]
    if missing:
        names = ", ".join(map(repr, missing[:_SHOWN]))
        raise error(f"{reason}, and the optimizer of {type(module).__name__} hasn't got {names}: {instead}")


def check_metric_schedulers(
    configs: Iterable[Any], reason: str, who: str, instead: str, *, error: type[TorchhalError] = ModelError
) -> None:
    """Raise an error for a scheduler that goes by a metric, such as ReduceLROnPlateau.

    Args:
        configs: the ``LRSchedulerConfig`` objects of the Trainer.
        reason: why all must have one learning rate.
        who: what has a metric of its own, such as ``"each peer"``.
        instead: what to do, to end the message with.
        error: the class of the error.

    .. versionadded:: 0.2
    """
    for config in configs:
        if config.reduce_on_plateau:
            name = type(config.scheduler).__name__
            raise error(f"{reason}, and {name} goes by a metric that {who} has its own of: {instead}")
