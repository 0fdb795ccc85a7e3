"""STR-101: models that a loop of the user's own calls, outside of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from torchhal_conformance._assertions import close
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import BATCH, TOLERANCE, Regression, running, share, tolerance_of

_STEPS = 3


def _data(rank: RankContext, number: int) -> tuple[torch.Tensor, ...]:
    return rank.random(BATCH, 6, seed=2 * number), rank.random(BATCH, 2, seed=2 * number + 1)


def _loss(call: Any, data: tuple[torch.Tensor, ...], number: int) -> torch.Tensor:
    """Call the model with a keyword; in the last step a second time, for the same backward."""
    x, y = data
    loss = F.mse_loss(call(x=x), y)
    return loss if number < _STEPS - 1 else loss + F.mse_loss(call(-x), y)


@check("STR-101", since="0.2", world_sizes=(1, 2), after=("STR-14",))
def models_that_a_loop_calls(rank: RankContext) -> None:
    """A model that a loop calls by forward_function trains as one that a step calls, and evaluates as it is.

    By keyword, and with two calls for one backward, too.

    Why: a call that goes past the wrapper computes right, and trains each rank's replica on its own data.
    Fix: override module_call where module_step or step_function is overridden, with the same around it.
    """
    with running(rank, Regression(), may_refuse=True) as run:
        strategy = run.strategy
        if reason := strategy.needs_trainer or strategy.call_refusal():
            raise NotApplicable(reason)
        assert strategy.module is not None
        call = strategy.forward_function(strategy.module.forward, training=True)
        for number in range(_STEPS):
            strategy.zero_grad(run.optimizer)
            strategy.backward(_loss(call, share(strategy, _data(rank, number)), number))
            strategy.optimizer_step(run.optimizer)
        plain = Regression()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for number in range(_STEPS):
            optimizer.zero_grad()
            _loss(plain, _data(rank, number), number).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        run.require_weights(f"after {_STEPS} steps of a loop that calls the model", plain)
        evaluate = strategy.forward_function(strategy.module.forward, training=False)
        data = share(strategy, _data(rank, 0))
        with torch.no_grad():
            output = evaluate(x=data[0]).cpu()
            expected = plain(data[0].cpu())
        close(
            "what a call without gradients gives", output, expected, 10 * tolerance_of(strategy, "weights", TOLERANCE)
        )
        rank.gather("done")
