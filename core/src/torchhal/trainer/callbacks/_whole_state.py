"""Determine whether each rank holds the whole model, and its optimizers' whole state."""

from __future__ import annotations

from torchhal._overrides import overrides
from torchhal.strategies import ParallelStrategy, Strategy


def gathers_weights(strategy: Strategy) -> bool:
    """Return whether a rank needs the others for the whole model's weights, as under a strategy that shards them."""
    # ParallelStrategy's own only replaces the buffers by rank 0's.
    own = (Strategy, ParallelStrategy)
    return strategy.world_size > 1 and all(overrides(strategy, base, "module_state_dict") for base in own)


def gathers_state(strategy: Strategy) -> bool:
    """Return whether a rank needs the others for the whole state of model, optimizers or schedulers."""
    names = ("optimizer_state", "scheduler_state")
    divided = strategy.world_size > 1 and any(overrides(strategy, Strategy, name) for name in names)
    return divided or gathers_weights(strategy)
