"""Refuse models, optimizers and schedulers that peers can't train together, before they meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import UnsupportedCombinationError
from torchhal.strategies import check_frequencies, check_lookups
from torchhal.strategies.model_checks import (
    check_automatic_optimization,
    check_dense_gradients,
    check_metric_schedulers,
    check_no_closure,
    check_one_optimizer,
)
from torchhal.trainer.loops import module_hook

_AVERAGED = (torch.float32, torch.bfloat16, torch.float16)


def check_model(me: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a model whose steps are not one optimizer's step with the average of all peers' gradients.

    Args:
        me: the strategy, as messages call it.
        module: the whole model.
        optimizers: what its ``configure_optimizers`` returned.

    Raises:
        UnsupportedCombinationError: the model or an optimizer can't be trained so.
        ModelError: an embedding treats the rows of each peer's batches differently.
    """
    name = type(module).__name__
    error = UnsupportedCombinationError
    check_automatic_optimization(module, f"{me} decides when a step is due", "leave one of them out", error=error)
    check_one_optimizer(module, optimizers, f"{me} averages for one optimizer", error=error)
    (optimizer,) = optimizers
    check_no_closure(optimizer, f"{me} steps with gradients that it has averaged", error=error)
    if module_hook(module, "configure_gradient_clipping") is not None:
        raise UnsupportedCombinationError(
            f"{me} clips the average of all peers, and {name}.configure_gradient_clipping would clip what one of "
            "them adds to it: use the Trainer's gradient_clip_val"
        )
    check_lookups(module, "each peer would look up, and scale, other rows")
    check_frequencies(module, "each peer")
    check_dense_gradients(module, f"{me} averages dense gradients", error=error)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype not in _AVERAGED:
                raise UnsupportedCombinationError(
                    f"{me} averages in float32, and {type(optimizer).__name__} of {name} holds a parameter of "
                    f"{parameter.dtype}: use float32, bfloat16 or float16"
                )


def check_schedulers(me: str, module: nn.Module, configs: Sequence[Any]) -> None:
    """Refuse a scheduler that would give each peer a learning rate of its own.

    Args:
        me: the strategy, as messages call it.
        module: the whole model.
        configs: the ``LRSchedulerConfig`` objects of the Trainer.

    Raises:
        UnsupportedCombinationError: a scheduler goes by a metric or by epochs, or the model steps them itself.
    """
    together = f"{me} steps schedulers with the collaboration"
    for config in configs:
        check_metric_schedulers(
            [config], together, "each peer", "use a scheduler that counts steps", error=UnsupportedCombinationError
        )
        if config.interval != "step":
            raise UnsupportedCombinationError(
                f"{together}, and {type(config.scheduler).__name__} has interval={config.interval!r}, a "
                "pass over the data of one peer: return {'scheduler': ..., 'interval': 'step'}, in which a step is "
                "one of all peers together"
            )
    if configs and module_hook(module, "lr_scheduler_step") is not None:
        raise UnsupportedCombinationError(
            f"{me} steps schedulers itself, on every peer alike, and {type(module).__name__} defines "
            "lr_scheduler_step: leave that out"
        )
