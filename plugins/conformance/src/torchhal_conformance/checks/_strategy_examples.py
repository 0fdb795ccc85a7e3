"""Train unusual models and whole epochs under a strategy, and the same in plain PyTorch in one process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, NotApplicable
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import (
    BATCH,
    Regression,
    batch,
    reference,
    running,
    share,
    two_groups,
)

ACCUMULATED = (2, 1, 2)
"""Batches per optimizer step, in each of the epochs."""
LENGTHS = (BATCH, BATCH, BATCH, BATCH // 2)
"""Samples of the batches of an epoch: the last one is short on every rank."""


class ManyKinds(Regression):
    """Model with a frozen parameter, and with buffers that are no floating-point numbers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        generator = torch.Generator().manual_seed(100 + seed)
        self.frozen = nn.Parameter(torch.randn(3, generator=generator), requires_grad=False)
        self.register_buffer("count", torch.tensor(5 * seed + 2**40))
        self.register_buffer("mask", torch.arange(4) % 2 == seed % 2)
        self.register_buffer("phase", torch.tensor([1 + 1j]) * (seed + 1))


class Tied(Regression):
    """Model in which one parameter has two names."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.head, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[0.8, 0.3], [-0.2, 0.9]]))
        self.last.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.head(super().forward(x)))  # type: ignore[no-any-return]


class TwoDtypes(Regression):
    """Model with a parameter in float64 among those in float32."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.float()


def check_initial_state(rank: RankContext) -> None:
    """Check that frozen parameters, and buffers of any dtype, are rank 0's after the set-up, and after a step.

    Not where the author gives a model: the strategy can't train this one.
    """
    if rank.component.model is not None:
        return

    def run() -> None:
        with running(rank, ManyKinds(rank.rank)) as run:
            weights = run.weights()
            for name, tensor in ManyKinds(0).state_dict().items():
                if weights:
                    same(f"{name} on rank {rank.rank} after the set-up, beside rank 0", weights[name], tensor)
            expected = dict(ManyKinds(0).named_buffers())
            for name, buffer in run.module.named_buffers():  # a state dict may show rank 0's in their place
                same(f"buffer {name} of rank {rank.rank}'s module, beside rank 0", buffer.cpu(), expected[name])
            run.train(0, 1)
            weights = run.weights()
            if weights:
                same("a frozen parameter after a step", weights["frozen"], ManyKinds(0).frozen.detach())

    _or_refused(rank, run)


def check_unusual_models(rank: RankContext) -> None:
    """Check three steps of models with tied parameters and with parameters of two dtypes; none with the author's."""
    if rank.component.model is not None:
        return
    for kind in (Tied, TwoDtypes):

        def run(kind: Any = kind) -> None:
            with running(rank, kind()) as run:
                run.train(0, 3)
                plain = reference(rank, 3, model=kind())[0]
                run.require_weights(f"after three steps of {kind.__name__}", plain)

        _or_refused(rank, run)


def _or_refused(rank: RankContext, run: Any) -> None:
    """Call ``run``, which may raise an error if it does so on every rank: the strategy refuses the model."""
    outcome, wrong = "", ""
    try:
        run()
    except CheckFailed as failure:
        wrong = str(failure)
    except NotApplicable:
        raise
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    everybody = rank.gather((outcome, wrong))
    require(not any(other for _, other in everybody), next((other for _, other in everybody if other), ""))
    outcomes = [one for one, _ in everybody]
    require(len({bool(one) for one in outcomes}) == 1, f"some ranks raised, others didn't: {outcomes}")


def check_epochs(rank: RankContext) -> None:
    """Check three epochs with all that a loop does: its hooks, accumulation, clipping, evaluation, a scheduler.

    An engine that decides itself when a step is due, or steps the schedulers, does that in its own way.
    """
    if rank.component.model is not None or rank.component.declared & {"owns_accumulation", "owns_schedulers"}:
        return

    def data(number: int) -> Any:
        rows = LENGTHS[number % len(LENGTHS)]
        return tuple(tensor[:rows] for tensor in batch(rank, number))

    # an engine that clips by itself is told so before its set-up, by a Trainer
    plain, clips = Regression(), "owns_clipping" not in rank.component.declared
    clip = 0.4
    optimizer = two_groups(plain.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    for epoch, parts in enumerate(ACCUMULATED):
        for index in range(len(LENGTHS)):
            if index % parts == 0:
                optimizer.zero_grad()
            loss = plain.training_step(data(len(LENGTHS) * epoch + index), index) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            if index % parts == parts - 1:
                if clips:
                    nn.utils.clip_grad_norm_(plain.parameters(), clip)
                optimizer.step()
        scheduler.step()
    with running(rank, make=two_groups, lr=0.05) as run:
        strategy = run.strategy
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.8)
        paused = strategy.no_backward_sync()
        for epoch, parts in enumerate(ACCUMULATED):
            strategy.on_train_epoch_start()
            for index in range(len(LENGTHS)):
                last = index % parts == parts - 1
                if index % parts == 0:
                    strategy.zero_grad(run.optimizer)
                with contextlib.nullcontext() if last or paused is None else paused:
                    mine = share(strategy, data(len(LENGTHS) * epoch + index))
                    strategy.backward(run.step(mine, index) / parts)
                if last:
                    if clips:
                        strategy.clip_gradients(run.optimizer, clip)
                    strategy.optimizer_step(run.optimizer)
            scheduler.step()
            if not strategy.evaluation_communicates:
                with torch.no_grad():
                    F.mse_loss(run.module(mine[0]), mine[1])
        run.require_weights(f"after {len(ACCUMULATED)} epochs", plain, 1e-4)
