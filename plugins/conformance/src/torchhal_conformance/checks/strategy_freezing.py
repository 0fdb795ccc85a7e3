"""STR-66: parameters that are frozen or unfrozen inside of an accumulation or of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from torchhal.errors import DistributedError, TorchhalError
from torchhal_conformance._assertions import raises
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import Regression, batch, refused_alike, running, share

PARTS = 3


class _InStep(Regression):
    """Model whose step freezes or unfreezes its first layer before the forward."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.trained = trained
        self.body[0].requires_grad_(not trained)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx:
            self.body[0].requires_grad_(self.trained)
        return super().training_step(batch, batch_idx)


def _between(module: Any, part: int) -> None:
    """Freeze the first layer and unfreeze the second one before the second part."""
    module.body[0].requires_grad_(part < 1)
    module.body[2].requires_grad_(part >= 1)


@check("STR-66", since="0.2", world_sizes=(1, 2), after=("STR-15", "STR-64"))
def frozen_in_the_midst(rank: RankContext) -> None:
    """Parameters that are frozen or unfrozen within an accumulation, or by a step, make plain torch's steps.

    Or they are an error of torchhal's on every rank. check_same_trained(), where the strategy has it, raises a
    DistributedError on every rank where ranks have frozen other layers, and none otherwise.

    Why: what was accumulated before the change was never averaged, and the ranks stepped with gradients of their own.
    Fix: average what was frozen when the change is seen, and in backward() what the step itself has unfrozen.
    """
    _ranks_that_differ(rank)
    outcomes = [
        _outcome(rank, _accumulated),
        _outcome(rank, partial(_in_step, trained=True)),
        _outcome(rank, partial(_in_step, trained=False)),
    ]
    if all(outcomes):
        raise NotApplicable(f"the strategy refuses parameters that are frozen in its run ({outcomes[0]})")


def _outcome(rank: RankContext, run: Callable[[RankContext], None]) -> str:
    """Return the error with which every rank refuses this, or an empty string."""
    with refused_alike(rank, "what was frozen in the midst", TorchhalError) as refusal:
        run(rank)
    return refusal.reason


def _ranks_that_differ(rank: RankContext) -> None:
    with running(rank) as run:
        check_same: Any = getattr(run.strategy, "check_same_trained", None)
        if check_same is None or rank.size == 1:
            return
        check_same([])
        run.module.body[2 * rank.rank].requires_grad_(False)
        raises("check_same_trained() of ranks that have frozen other layers", DistributedError, lambda: check_same([]))
        rank.gather("compared")


def _accumulated(rank: RankContext) -> None:
    plain = Regression()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for part in range(PARTS):
        _between(plain, part)
        rows = tuple(tensor[4 * part : 4 * part + 4] for tensor in batch(rank, 0))
        (F.mse_loss(plain(rows[0]), rows[1]) / PARTS).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with running(rank) as run:  # all is trained at the set-up, or it would be no parameter of the optimizer
        strategy, paused = run.strategy, run.strategy.no_backward_sync()
        strategy.zero_grad(run.optimizer)
        for part in range(PARTS):
            _between(run.module, part)
            data = share(strategy, tuple(tensor[4 * part : 4 * part + 4] for tensor in batch(rank, 0)))
            with contextlib.nullcontext() if paused is None or part == PARTS - 1 else paused:
                strategy.backward(run.step(data, part) / PARTS)
        strategy.optimizer_step(run.optimizer)
        run.require_weights("after an accumulation in which layers were frozen and unfrozen", plain)


def _in_step(rank: RankContext, trained: bool) -> None:
    plain = _InStep(trained)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        plain.training_step(batch(rank, number), number).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    module = _InStep(trained)
    with running(rank, module, make=lambda _, lr: torch.optim.SGD(module.parameters(), lr=lr)) as run:
        run.train(0, 3)
        run.require_weights(f"after a step that {'unfroze' if trained else 'froze'} a layer", plain)
