"""STR-52, STR-90: several optimizers, each with a state of its own, and a step with a closure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError, ModelError, TorchhalError
from torchhal.strategies import Strategy
from torchhal_conformance._assertions import close, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import (
    Regression,
    batch,
    make_model,
    reference,
    refused_alike,
    require_steps_of_the_loop,
    running,
    share,
    two_groups,
    values,
    weights_close,
)
from torchhal_conformance.checks._strategy_state import load_rank_state, states_of_ranks


class _OwnSGD(torch.optim.SGD):
    """An optimizer of the user's own, which isn't of torch's modules."""


@check("STR-90", since="0.2", world_sizes=(1, 2), timeout=60, after=("STR-22",))
def several_optimizers(rank: RankContext) -> None:
    """Two optimizers train as in plain torch, and a resumed run continues each of them from its own state.

    One of them is of a class of the user's own. A strategy that takes one optimizer only raises ConfigurationError on
    every rank.

    Why: the second optimizer of a GAN began anew in each resumed run, with momentum and step count of zero.
    Fix: restore the state of the optimizer that load_optimizer_state is given.
    """
    require_steps_of_the_loop(rank)
    plain = make_model(rank)
    optimizers = _optimizers(plain)
    for number in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain.training_step(batch(rank, number), number).backward()
        for optimizer in optimizers:
            optimizer.step()
    path = os.path.join(rank.folder, "two.ckpt")
    with rank.set_up_strategy() as strategy:
        step = _set_up(rank, strategy, 0)
        _train(rank, strategy, step, 0, 2)
        states = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
        state = {
            "model": strategy.module_state_dict(), "optimizers": states, "strategy": strategy.state_dict(),
            "ranks": states_of_ranks(rank, strategy),
        }  # fmt: skip
        strategy.save_checkpoint(state, path)
        strategy.wait_for_checkpoints()
        _train(rank, strategy, step, 2, 4)
        expected = values(strategy)
        if "lossy" not in strategy.features:  # whose tolerances are of SGD
            weights_close("after four steps of two optimizers", expected, plain, 1e-4)
        rank.gather("saved")
    with rank.set_up_strategy() as strategy:
        step = _set_up(rank, strategy, 7)
        loaded = strategy.load_checkpoint(path)
        strategy.load_state_dict(loaded["strategy"])
        strategy.load_module_state_dict(loaded["model"])
        for optimizer, state in zip(strategy.optimizers, loaded["optimizers"], strict=True):
            strategy.load_optimizer_state(optimizer, state)
        load_rank_state(rank, strategy, loaded["ranks"])
        _train(rank, strategy, step, 2, 4)
        for name, tensor in values(strategy).items():
            close(f"after a resume of two optimizers, and two more steps: {name}", tensor, expected[name], 1e-6)
        rank.gather("done")


@check("STR-52", since="0.2", world_sizes=(1, 2), after=("STR-16", "STR-19"))
def step_with_a_closure(rank: RankContext) -> None:
    """optimizer_step evaluates its closure once, with SGD, and steps with the gradients that this leaves.

    The closure clears the optimizer's gradients, and runs forward and backward. A strategy that can't evaluate one
    raises an error on every rank.

    Why: the closure was ignored, and steps were made with the gradients of before; or the optimizer had a part of its
    parameters meanwhile, and the gradients of the others were never cleared.
    Fix: evaluate the closure first, with gradients on and all parameters in the optimizer.
    """
    plain, _ = reference(rank, 3, make=two_groups)
    with running(rank, make=two_groups) as run:
        strategy, optimizer = run.strategy, run.optimizer
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            number = len(losses)
            loss: torch.Tensor = run.step(share(strategy, batch(rank, number)), number)
            losses.append(loss)
            strategy.backward(loss)
            return loss

        for number in range(3):
            with refused_alike(rank, "a closure", TorchhalError) as refusal:
                strategy.optimizer_step(optimizer, closure)
            if refusal.reason:
                raise NotApplicable(f"the strategy refuses a closure ({refusal.reason})")
            same("how often the closure ran", len(losses), number + 1)
        run.require_weights("after three steps with a closure", plain)


def _optimizers(module: Any) -> list[Optimizer]:
    """Return Adam for every other parameter and SGD with momentum for the rest: two states of other forms."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [torch.optim.Adam(trained[::2], lr=0.05, eps=1e-3), _OwnSGD(trained[1::2], lr=0.1, momentum=0.9)]


def _set_up(rank: RankContext, strategy: Strategy, seed: int) -> Any:
    """Set a model of ``seed`` up under ``strategy`` with its two optimizers, and return its training step."""
    module = make_model(rank, seed)
    strategy.connect(module)
    strategy.setup_model()
    setup_several(rank, strategy, _optimizers(module))
    return strategy.step_function("training_step")


def setup_several(
    rank: RankContext, strategy: Strategy, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()
) -> None:
    """Set up several optimizers.

    Raises:
        NotApplicable: the strategy refuses them on every rank.
    """
    refused = ""
    try:
        strategy.setup_optimizers(optimizers, lr_scheduler_configs)
    except (ConfigurationError, ModelError) as error:
        refused = str(error)
    if all(rank.gather(refused)):
        raise NotApplicable(f"the strategy takes one optimizer only ({refused})")


def two_optimizers(strategy: Strategy) -> list[Optimizer]:
    """Set up the kit's small net under ``strategy``; return SGD for its first layer and SGD for the others."""
    module = Regression()
    strategy.connect(module)
    strategy.setup_model()
    rest = [*module.body[2].parameters(), *module.body[4].parameters()]
    return [torch.optim.SGD(module.body[0].parameters(), lr=0.1), torch.optim.SGD(rest, lr=0.2)]


def _train(rank: RankContext, strategy: Strategy, step: Any, first: int, end: int) -> None:
    for number in range(first, end):
        for optimizer in strategy.optimizers:
            strategy.zero_grad(optimizer)
        strategy.backward(step(share(strategy, batch(rank, number)), number))
        for optimizer in strategy.optimizers:
            strategy.optimizer_step(optimizer)
