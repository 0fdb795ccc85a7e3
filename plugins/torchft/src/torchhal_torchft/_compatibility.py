"""Refuse models, optimizers and schedulers that replica groups can't train together, before they meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def check_model(me: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a model whose steps are not one mean gradient and one optimizer step.

    Args:
        me: the strategy, as messages call it.
        module: the whole model.
        optimizers: what its ``configure_optimizers`` returned.

    Raises:
        UnsupportedCombinationError: the model or an optimizer can't be trained so.
        ModelError: an embedding treats the rows of each group's batches differently.
    """
    error = UnsupportedCombinationError
    agreed = f"{me} steps only where all replica groups agree"
    check_automatic_optimization(module, agreed, "leave one of them out", error=error)
    check_one_optimizer(module, optimizers, f"{me} agrees on the steps of one optimizer", error=error)
    check_no_closure(optimizers[0], f"{me} steps with gradients that it has averaged", error=error)
    check_lookups(module, "each replica group would look up, and scale, other rows")
    check_frequencies(module, "each replica group")
    check_dense_gradients(module, f"{me} averages dense gradients", error=error)


def check_schedulers(me: str, configs: Sequence[Any]) -> None:
    """Raise UnsupportedCombinationError for a scheduler that would give each group a learning rate of its own.

    Args:
        me: the strategy, as messages call it.
        configs: the ``LRSchedulerConfig`` objects of the Trainer.
    """
    check_metric_schedulers(
        configs,
        f"{me} needs one learning rate in all replica groups",
        "each group",
        "use a scheduler that counts steps or epochs",
        error=UnsupportedCombinationError,
    )
