"""STR: the state that each rank has of its own, and the dtypes of the optimizer's state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from torchhal.errors import CheckpointMismatchError
from torchhal_conformance._assertions import close, plain, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import Regression, StrategyRun, running
from torchhal_conformance.checks._strategy_state import load_rank_state, rank_state_of, states_of_ranks


def _saved(rank: RankContext, run: StrategyRun) -> dict[str, Any]:
    return {
        # copies: what these return may be the tensors that the next step changes, as torch's state dicts are
        "model": copy.deepcopy(run.strategy.module_state_dict()),
        "optimizer": copy.deepcopy(run.strategy.optimizer_state(run.optimizer)),
        "strategy": copy.deepcopy(run.strategy.state_dict()),
        "ranks": states_of_ranks(rank, run.strategy),
    }


@check("STR-49", since="0.2", world_sizes=(2,), timeout=60)
def rank_state(rank: RankContext) -> None:
    """What rank_state_dict() returns is plain data with which a new life goes on, on each rank with its own.

    Why: compression keeps the error of each rank for its next step; a resume that begins with none, or with rank 0's on
    all, trains something else.
    Fix: put all that changes and differs between ranks into rank_state_dict(), and restore it in load_rank_state_dict.
    """
    with running(rank, make=torch.optim.Adam, lr=0.05) as run:
        run.train(0, 4)
        saved = _saved(rank, run)
        if not any(saved["ranks"]):
            raise NotApplicable("the strategy has no per-rank state")
        plain("rank_state_dict()", saved["ranks"][rank.rank])
        run.train(4, 6)
        expected, expected_own = run.weights(), rank_state_of(run.strategy)
        everybody = rank.gather(saved)
    with running(rank, Regression(7), make=torch.optim.Adam, lr=0.05) as run:
        run.strategy.load_state_dict(everybody[0]["strategy"])
        run.strategy.load_module_state_dict(everybody[0]["model"])
        run.strategy.load_optimizer_state(run.optimizer, everybody[0]["optimizer"])
        load_rank_state(rank, run.strategy, saved["ranks"])
        same("rank_state_dict() after it was loaded", rank_state_of(run.strategy), saved["ranks"][rank.rank])
        run.train(4, 6)
        for name, tensor in run.weights().items():
            close(f"{name} after a resume", tensor, expected[name], 1e-6)
        same("rank_state_dict() two steps after a resume", rank_state_of(run.strategy), expected_own)
        rank.gather("done")


@check("STR-50", since="0.2", world_sizes=(2,), timeout=60)
def resharded_rank_state(rank: RankContext) -> None:
    """reshard_rank_state shares the states of 2 ranks out to 1 or 3, or raises CheckpointMismatchError.

    The error names the strategy and both numbers of ranks. Without per-rank state there is nothing to refuse.

    Why: a rank that is new gets an IndexError in the midst of a resume, or no error and another's state.
    Fix: leave reshard_rank_state out, whose default refuses, or return a state for every rank.
    """
    with running(rank, make=torch.optim.Adam, lr=0.05) as run:
        run.train(0, 3)
        states = states_of_ranks(rank, run.strategy)
        check_resharding(run.strategy, states, lambda: rank_state_of(run.strategy))
        if rank.component.cls.reshard_rank_state.__qualname__ == "StrategyState.reshard_rank_state":  # no rule here
            states = [{"error": float(number)} for number in range(2)]
            check_resharding(run.strategy, states, lambda: rank_state_of(run.strategy))
        rank.gather("done")


def check_resharding(owner: Any, states: list[dict[str, Any]], own: Any) -> None:
    """Fail unless ``owner`` shares ``states`` out to one rank and to one more than there are, or refuses."""
    before = own()
    for world_size in (1, len(states) + 1):
        for number in range(world_size):
            try:
                found = owner.reshard_rank_state(copy.deepcopy(states), rank=number, world_size=world_size)
            except CheckpointMismatchError as error:
                require(any(states), f"there is no per-rank state to refuse (got {error})")
                said = str(error)
                for part in (owner.alias or type(owner).__name__, str(len(states)), str(world_size)):
                    require(part in said, f"the refusal of another number of ranks must name {part!r} (got {said})")
                continue
            except Exception as error:
                raise CheckFailed(
                    f"reshard_rank_state for rank {number} of {world_size} must return a state or raise "
                    f"CheckpointMismatchError (got {type(error).__name__}: {error})"
                ) from error
            require(isinstance(found, Mapping), f"reshard_rank_state must return a dict (got {found!r})")
            plain(f"the state for rank {number} of {world_size}", dict(found))
    same("the owner's own state after reshard_rank_state", own(), before)


@check("STR-51", since="0.2", world_sizes=(2,), timeout=60)
def optimizer_state_dtype(rank: RankContext) -> None:
    """load_optimizer_state keeps the dtypes that the precision's optimizer_state_dtype gives.

    Why: torch casts all loaded state to the parameters' dtype, so float32 moments of bfloat16 weights lose their digits
    in each resume.
    Fix: call the inherited load_optimizer_state, or declare "owns_optimizer_state" for an engine that can't.
    """
    if "owns_optimizer_state" in rank.component.declared:
        raise NotApplicable("the strategy stores the optimizer's state by rules of its own")
    kept = torch.bfloat16
    with running(rank, make=torch.optim.Adam) as run:
        run.train(0, 2)
        state = rank.gather(copy.deepcopy(run.strategy.optimizer_state(run.optimizer)))[0]
        for entry in state["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = entry[name].to(kept)
        vars(run.strategy.precision)["optimizer_state_dtype"] = lambda parameter, name: kept
        run.strategy.load_optimizer_state(run.optimizer, copy.deepcopy(state))
        loaded = run.strategy.optimizer_state(run.optimizer)
        if rank.rank == 0:
            for index, entry in state["state"].items():
                for name in ("exp_avg", "exp_avg_sq"):
                    found = loaded["state"][index][name]
                    same(f"dtype of {name!r} of parameter {index} after a load", found.dtype, kept)
                    same(f"{name!r} of parameter {index} after a load", found.cpu(), entry[name].cpu())
        rank.gather("done")
