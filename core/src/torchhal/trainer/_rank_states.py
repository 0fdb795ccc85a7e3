"""Save the state that each rank of a strategy or a precision has of its own, and restore it on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchhal._rank_state import STATES_KEY, class_name
from torchhal.pytree import map_tensors
from torchhal.strategies import Strategy

if TYPE_CHECKING:
    from torchhal.trainer.run_state import RunState


def _owners(strategy: Strategy) -> Iterator[tuple[str, Any]]:
    yield "precision", strategy.precision
    yield "strategy", strategy


def rank_states(strategy: Strategy) -> dict[str, dict[str, Any]]:
    """Return this rank's states that are not empty, by the kind of their owner.

    Called on every rank.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind, owner in _owners(strategy):
        state = owner.rank_state_dict()
        if not isinstance(state, dict):
            raise TypeError(f"{type(owner).__name__}.rank_state_dict must return a dict (got {state!r})")
        if state:
            found[kind] = state
    return found


def gather_rank_states(
    strategy: Strategy,
    own: Mapping[str, dict[str, Any]],
    kinds: Sequence[Sequence[str]],
    ranks: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Put the states of all ranks into ``ranks``, on rank 0; return the field that says who has written them.

    Called on every rank. They come to rank 0 one rank after the other, so no other rank has room for all of them.
    Nothing is sent where all are empty.

    Args:
        strategy: the strategy of the run.
        own: what :func:`rank_states` returned on this rank.
        kinds: its keys on each rank.
        ranks: the entries of the checkpoint, one per rank.

    Returns:
        ``{}`` if all states are empty.
    """
    present = [kind for kind, _ in _owners(strategy) if any(kind in each for each in kinds)]
    for rank, has in enumerate(kinds):
        sent: Mapping[str, Any] = {}
        if has:
            sent = map_tensors(dict(own), _to_host) if rank == strategy.global_rank else {}
            if rank > 0:
                sent = strategy.broadcast(sent, src=rank)
        if strategy.is_global_zero:
            ranks[rank].update({kind: sent.get(kind, {}) for kind in present})
    return {
        kind: {"class": class_name(owner), "alias": owner.alias, "world_size": len(kinds)}
        for kind, owner in _owners(strategy)
        if kind in present
    }


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def choose_rank_states(run: RunState, checkpoint: Mapping[str, Any], path: str) -> dict[str, Mapping[str, Any]]:
    """Return the states with which this rank continues, by the kind of their owner; restore nothing.

    The state of another class is left out, with a warning.

    Raises:
        CheckpointMismatchError: another number of ranks has saved, and the owner can't share their states out.
    """
    strategy, ranks = run.strategy, checkpoint["ranks"]
    chosen: dict[str, Mapping[str, Any]] = {}
    for kind, owner in _owners(strategy):
        writer = checkpoint.get(STATES_KEY, {}).get(kind)
        if writer is None:
            continue
        if writer["class"] != (name := class_name(owner)):
            run.warn_once(
                f"{path!r} has per-rank state of {kind} {writer['alias'] or writer['class']!r} ({writer['class']}), "
                f"and this run's is {owner.alias or name!r} ({name}): that state is left out"
            )
            continue
        states = [entry[kind] for entry in ranks]
        if len(states) == strategy.world_size:
            chosen[kind] = states[strategy.global_rank]
            continue
        chosen[kind] = owner.reshard_rank_state(states, rank=strategy.global_rank, world_size=strategy.world_size)
    return chosen


def load_rank_state(strategy: Strategy, kind: str, state: Mapping[str, Any]) -> None:
    """Load a state that :func:`choose_rank_states` returned into its owner."""
    dict(_owners(strategy))[kind].load_rank_state_dict(state)
