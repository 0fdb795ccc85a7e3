"""STR: state dicts, resumes and loads of what several ranks have trained."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from torchhal.errors import CheckpointMismatchError
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import (
    Regression,
    StrategyRun,
    make_model,
    reference,
    running,
    two_groups,
    weights_close,
)
from torchhal_conformance.checks._strategy_state import load_rank_state, states_of_ranks


@check("STR-21", world_sizes=(2,))
def unprefixed(rank: RankContext) -> None:
    """The user's module keeps its attributes and methods, and state dicts have its own names, no wrapper's prefix.

    Changed: torch.compile is left out, whose compiler takes longer than all other checks.

    Why: "module." in a checkpoint's keys makes it unreadable without the strategy that wrote it.
    Fix: take the state of strategy.module, and strip what the wrapper adds.
    """
    with running(rank) as run:
        require(run.strategy.module is run.module, "strategy.module is another object than the user's")
        require(callable(run.module.training_step), "the user's method is gone")
        state = run.strategy.module_state_dict()
        expected = list(make_model(rank).state_dict())
        if state or rank.rank == 0:
            same("the names in module_state_dict()", sorted(state), sorted(expected))


def _checkpoint(run: StrategyRun, scheduler: Any) -> dict[str, Any]:
    return {
        "model": run.strategy.module_state_dict(),
        "optimizer": run.strategy.optimizer_state(run.optimizer),
        "scheduler": scheduler.state_dict(),
        "precision": run.strategy.precision.state_dict(),
        "strategy": run.strategy.state_dict(),
        "ranks": states_of_ranks(run.rank, run.strategy),
    }


@check("STR-22", world_sizes=(2,), timeout=60, after=("STR-16",))
def resume(rank: RankContext) -> None:
    """Two steps, a checkpoint, and two more in a new life are four steps: weights, optimizer, scheduler, precision.

    The options of every parameter group are those of the checkpoint.

    Changed: random numbers are the Trainer's to save and restore, not a strategy's; core's tests resume with dropout.

    Why: a resume without the optimizer's state jumps, and the curve is smoothed until nobody sees it.
    Fix: gather the optimizer's whole state in optimizer_state, and scatter it in load_optimizer_state.
    """
    path = os.path.join(rank.folder, "x.ckpt")

    def scheduled(run: StrategyRun) -> Any:
        return torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.7)

    def train(run: StrategyRun, scheduler: Any, first: int, last: int) -> None:
        for number in range(first, last):
            run.train(number, number + 1)
            scheduler.step()

    with running(rank, make=torch.optim.Adam, lr=0.05) as run:
        scheduler = scheduled(run)
        train(run, scheduler, 0, 2)
        run.strategy.save_checkpoint(_checkpoint(run, scheduler), path)
        run.strategy.wait_for_checkpoints()
        train(run, scheduler, 2, 4)
        expected = run.weights()
        rank.gather("saved")
    with running(rank, make_model(rank, 7), make=torch.optim.Adam, lr=0.05) as run:
        scheduler = scheduled(run)
        loaded = run.strategy.load_checkpoint(path)
        run.strategy.load_state_dict(loaded["strategy"])
        run.strategy.load_module_state_dict(loaded["model"])
        run.strategy.load_optimizer_state(run.optimizer, loaded["optimizer"])
        run.strategy.precision.load_state_dict(loaded["precision"])
        scheduler.load_state_dict(loaded["scheduler"])
        load_rank_state(rank, run.strategy, loaded["ranks"])
        train(run, scheduler, 2, 4)
        for name, tensor in run.weights().items():
            close(f"{name} after a resume", tensor, expected[name], 1e-6)
        rank.gather("done")
    if rank.component.model is None:
        _resume_two_groups(rank)


def _resume_two_groups(rank: RankContext) -> None:
    """Check that a resume restores the options of both parameter groups, over those that the program has set."""
    path = os.path.join(rank.folder, "groups.ckpt")
    with running(rank, make=two_groups, lr=0.05) as run:
        run.train(0, 2)
        state = {
            "model": run.strategy.module_state_dict(),
            "optimizer": run.strategy.optimizer_state(run.optimizer),
            "strategy": run.strategy.state_dict(),
            "ranks": states_of_ranks(rank, run.strategy),
        }
        run.strategy.save_checkpoint(state, path)
        run.strategy.wait_for_checkpoints()
        run.train(2, 4)
        expected = run.weights()
        rank.gather("saved")
    with running(rank, Regression(7), make=two_groups, lr=0.3) as run:
        loaded = run.strategy.load_checkpoint(path)
        run.strategy.load_state_dict(loaded["strategy"])
        run.strategy.load_module_state_dict(loaded["model"])
        run.strategy.load_optimizer_state(run.optimizer, loaded["optimizer"])
        rates = [float(group["lr"]) for group in run.optimizer.param_groups]
        load_rank_state(rank, run.strategy, loaded["ranks"])
        close("the learning rates of two groups after a resume", rates, [0.05, 0.025], 1e-6)
        run.train(2, 4)
        for name, tensor in run.weights().items():
            close(f"{name} after a resume of two parameter groups", tensor, expected[name], 1e-6)
        rank.gather("done")


@check("STR-23", features=["portable"], world_sizes=(2,), after=("STR-14",))
def portable(rank: RankContext) -> None:
    """A checkpoint's weights load into the plain module, in one process without the strategy.

    Why: a model that only the cluster it was trained on can open.
    Fix: save whole tensors under the user's names, or let the checkpoint IO put them together.
    """
    path = os.path.join(rank.folder, "x.ckpt")
    with running(rank) as run:
        run.train(0, 1)
        run.strategy.save_checkpoint({"model": run.strategy.module_state_dict()}, path)
        run.strategy.wait_for_checkpoints()
        tolerance = run.tolerance
        rank.gather("saved")
    if rank.rank == 0:
        from torchhal.checkpoint import TorchCheckpointIO

        model = make_model(rank, 7)
        model.load_state_dict(TorchCheckpointIO().load_checkpoint(path)["model"])
        weights_close("the plain module that loaded it", model.state_dict(), reference(rank, 1)[0], tolerance)
    rank.gather("done")


@check("STR-25", world_sizes=(2,))
def strict_load(rank: RankContext) -> None:
    """load_module_state_dict refuses other keys and shapes by name.

    With strict=False it loads what fits and returns the rest.

    Why: half a model from a file and half from the initialization trains without an error.
    Fix: raise CheckpointMismatchError from what load_state_dict raises, and return its result.
    """
    with running(rank) as run:
        state = {name: tensor.clone() for name, tensor in Regression(3).state_dict().items()}
        lacking = {name: tensor for name, tensor in state.items() if name != "body.0.bias"}
        other = {**state, "body.0.bias": torch.zeros(5)}
        load = run.strategy.load_module_state_dict
        raises("a state without a key", CheckpointMismatchError, lambda: load(lacking), "body.0.bias")
        raises("a state with another shape", CheckpointMismatchError, lambda: load(other), "body.0.bias")
        rest = load({**lacking, "extra": torch.zeros(1)}, strict=False)
        same("what strict=False returns as missing", list(rest.missing_keys), ["body.0.bias"])
        same("what strict=False returns as unexpected", list(rest.unexpected_keys), ["extra"])
        load(state)
        weights_close("after the load", run.weights(), Regression(3), 0.0)


@check("STR-26", world_sizes=(2,))
def optimizer_device(rank: RankContext) -> None:
    """After load_optimizer_state the optimizer's tensors are on the parameters' device.

    Why: a state that came from a file is on the CPU, and the next step raises.
    Fix: let Optimizer.load_state_dict move it, or move it yourself.
    """
    with running(rank, make=torch.optim.Adam) as run:
        run.train(0, 1)
        state = copy.deepcopy(run.strategy.optimizer_state(run.optimizer))
        everybody = rank.gather(state)
        run.strategy.load_optimizer_state(run.optimizer, everybody[0])
        for values in run.optimizer.state.values():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    same(f"device type of the optimizer's {name}", value.device.type, run.strategy.root_device.type)
        run.train(1, 2)
