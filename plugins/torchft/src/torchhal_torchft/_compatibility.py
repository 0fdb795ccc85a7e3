"""Models that replica groups can't train together, refused before they meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import needs_closure
from torchhal.strategies import check_frequencies, check_lookups


def check_model(me: str, module: Any, optimizers: Sequence[Optimizer]) -> None:
    """Raise UnsupportedCombinationError for a model whose steps are not one mean gradient and one optimizer step."""
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        raise UnsupportedCombinationError(
            f"{me} steps only where all replica groups agree, and {name} has automatic_optimization=False: leave one "
            "of them out"
        )
    if len(optimizers) != 1:
        raise UnsupportedCombinationError(
            f"{me} agrees on the steps of one optimizer, and {name}.configure_optimizers returned {len(optimizers)}: "
            "put the parameters into groups of one"
        )
    if needs_closure(optimizers[0]):
        raise UnsupportedCombinationError(
            f"{me} steps with gradients that it has averaged, and {type(optimizers[0]).__name__} evaluates the model "
            "within a step: use an optimizer that needs no closure"
        )
    check_lookups(module, "each replica group would look up, and scale, other rows")
    check_frequencies(module, "each replica group")
    for key, part in module.named_modules():
        if getattr(part, "sparse", False) and isinstance(part, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedCombinationError(
                f"{me} averages dense gradients, and {key or name!r} has sparse=True: set it to False"
            )


def check_schedulers(me: str, configs: Sequence[Any]) -> None:
    """Raise UnsupportedCombinationError for a scheduler that would give each group a learning rate of its own."""
    for config in configs:
        if config.reduce_on_plateau:
            raise UnsupportedCombinationError(
                f"{me} needs one learning rate in all replica groups, and {type(config.scheduler).__name__} goes by a "
                "metric that each group has its own of: use a scheduler that counts steps or epochs"
            )
