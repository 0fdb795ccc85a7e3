"""Refuse callbacks under strategies whose engine has as its own what they would change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchhal.errors import ConfigurationError

if TYPE_CHECKING:
    from torchhal import Trainer

WEIGHTS = frozenset({"owns_step", "owns_accumulation", "owns_optimizer_state"})
"""Features of strategies whose engine may keep weights of its own: on its device, in another dtype, in parts."""

OPTIMIZERS = WEIGHTS | {"owns_backward", "owns_schedulers"}
"""Features of strategies whose engine sets up optimizers and schedulers once for a fit."""


def refuse_engines(trainer: Trainer, callback: Any, features: frozenset[str], why: str) -> None:
    """Raise ConfigurationError if the run's strategy has one of ``features``; ``why`` is what its engine does."""
    strategy = trainer.strategy
    if features & set(strategy.features):
        raise ConfigurationError(
            f"{type(callback).__name__} can't be used with strategy {strategy.display_name!r}, whose engine {why}: use "
            "another strategy, or leave the callback out"
        )
