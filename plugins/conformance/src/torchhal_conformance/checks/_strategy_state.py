"""Save and restore the state that each rank of a strategy has of its own, as the Trainer does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from torchhal.pytree import map_tensors
from torchhal.strategies import Strategy
from torchhal_conformance._assertions import require
from torchhal_conformance._rank_context import RankContext


def rank_state_of(strategy: Strategy) -> dict[str, Any]:
    """Return a copy, on the CPU, of the state that this rank has of its own."""
    state = strategy.rank_state_dict()
    require(isinstance(state, dict), f"rank_state_dict() must return a dict (got {state!r})")
    return copy.deepcopy(
        map_tensors(state, lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf)
    )


def states_of_ranks(rank: RankContext, strategy: Strategy) -> list[dict[str, Any]]:
    """Return the state of every rank, on every rank."""
    return rank.gather(rank_state_of(strategy))


def load_rank_state(rank: RankContext, strategy: Strategy, states: Sequence[dict[str, Any]]) -> None:
    """Restore this rank's of ``states``: after all else, and only if a rank has one."""
    if any(states):
        strategy.load_rank_state_dict(copy.deepcopy(states[rank.rank]))
