"""STR-56 to STR-58: replicas that diverge, batch norms over all ranks, and layers that write to their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchhal.errors import DistributedError, ModelError, UnsupportedCombinationError
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import (
    Regression,
    batch,
    reference,
    refused_alike,
    require_several_ranks,
    require_steps_of_the_loop,
    running,
    share,
)
from torchhal_conformance.checks.strategy_gradients import require_whole_parameters


def _declaring(strategy: Any, **declared: Any) -> Any:
    """Return the strategy as an object of a subclass that declares this."""
    kind = type(strategy)
    strategy.__class__ = type(kind.__name__, (kind,), declared)
    return strategy


@check("STR-56", since="0.2", world_sizes=(2,), after=("STR-17",))
def replicas_that_differ(rank: RankContext) -> None:
    """check_replicas() raises DistributedError on every rank where compares_replicas is true and replicas differ.

    Otherwise, and for replicas that are the same, it raises nothing. What parameters_to_ignore() names may differ,
    or is refused with ModelError.

    Why: a layer that each rank trains by itself made of one model as many as there are ranks, and rank 0's was saved.
    Fix: declare compares_replicas, and call the inherited method.
    """
    require_several_ranks(rank)
    if not getattr(rank.component.cls, "compares_replicas", False) or "lossy" in rank.component.declared:
        raise NotApplicable("its replicas may differ, or there are none")
    with running(rank, Regression()) as run:
        require_whole_parameters(run)
        run.train(0, 1)
        run.strategy.check_replicas()
        if rank.rank == 1:
            with torch.no_grad():
                next(run.module.parameters()).add_(1.0)
        raises("check_replicas() of replicas that differ", DistributedError, run.strategy.check_replicas)
        rank.gather("refused")
    _require_not_compared(rank, compares_replicas=False)
    # one that steps each parameter on one rank for all can't leave any to each rank, and refuses the model
    with refused_alike(rank, "a parameter that each rank trains by itself", NotApplicable):
        _require_not_compared(rank, may_refuse=True, parameters_to_ignore=lambda self: ("body.0.weight",))


def _require_not_compared(rank: RankContext, *, may_refuse: bool = False, **declared: Any) -> None:
    """Fail where check_replicas() of a strategy that declares this looks at a parameter of the ranks that differs."""
    strategy = _declaring(rank.create_strategy(), **declared)
    with running(rank, Regression(), strategy=strategy, may_refuse=may_refuse) as run:
        if rank.rank == 1:
            with torch.no_grad():
                next(run.module.parameters()).add_(1.0)
        run.strategy.check_replicas()
        rank.gather("not compared")


class _Normed(Regression):
    """Model with a batch norm."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))  # type: ignore[no-any-return]


@check("STR-57", since="0.2", world_sizes=(1, 2), after=("STR-14",))
def batch_norms_of_all_ranks(rank: RankContext) -> None:
    """With sync_batchnorm a batch norm computes over the batches of all ranks, as in one process, or it is refused.

    check_sync_batchnorm() refuses it, before anything is started. Where it is inherited, it does so for several ranks
    without synchronizes_batchnorms, and never with it. A module that another one has replaced normalizes by its own
    batch again.

    Why: each rank normalized by a share of the batch, and the statistics that were saved were rank 0's.
    Fix: return the group of the ranks with other samples from batch_group(); refuse in check_sync_batchnorm().
    """
    if rank.component.cls.check_sync_batchnorm.__qualname__ == "ParallelStrategy.check_sync_batchnorm":
        _refuse_by_declaration(rank)
    strategy = rank.create_strategy()
    try:
        strategy.check_sync_batchnorm(rank.size)
    except UnsupportedCombinationError as error:
        raise NotApplicable(f"the strategy refuses it: {error}") from error
    strategy.sync_batchnorm = True
    with rank.set_up_strategy(strategy):
        replaced = _Normed()
        for module in (replaced, _Normed()):
            strategy.connect(module)
        own = rank.random(4, 2, seed=rank.rank)
        close("a batch norm of a module that was replaced", replaced.norm(own), nn.BatchNorm1d(2)(own), 1e-6)
        rank.gather("normalized")
    with running(rank, _Normed(), strategy=strategy, may_refuse=True) as run:
        share_of = strategy.distributed_sampler_kwargs
        alone = share_of is None or share_of["num_replicas"] == 1  # or ranks with parts of one model see one batch
        require((strategy.batch_group() is None) == alone, "batch_group() isn't that of the ranks with other samples")
        for first, steps in ((0, 1), (1, 3)):
            run.train(first, steps)
            after = f"after {steps} step(s) with a batch norm over all ranks"
            expected, _ = reference(rank, steps, model=_Normed())
            if weights := run.weights():
                _compare_statistics(after, weights, expected.norm, len(batch(rank, 0)[0]), steps)
            if "lossy" in strategy.features:  # the statistics of the first step don't depend on gradients
                break
            expected.norm.running_var = weights.get("norm.running_var", expected.norm.running_var)
            run.require_weights(after, expected, 1e-4)


def _refuse_by_declaration(rank: RankContext) -> None:
    _declaring(rank.create_strategy(), synchronizes_batchnorms=True).check_sync_batchnorm(2)
    strategy = _declaring(rank.create_strategy(), synchronizes_batchnorms=False)
    strategy.check_sync_batchnorm(1)
    told = "check_sync_batchnorm(2) of a class that declares no synchronizes_batchnorms"
    raises(told, UnsupportedCombinationError, lambda: strategy.check_sync_batchnorm(2))
    if rank.component.cls.batch_group.__qualname__ == "ParallelStrategy.batch_group":
        with rank.set_up_strategy(strategy):
            require(strategy.batch_group() is None, "batch_group() of such a class isn't None")
            rank.gather("looked")


def _compare_statistics(after: str, weights: Any, norm: Any, samples: int, steps: int) -> None:
    """Compare with those of ``norm``; the variance may lack n / (n - 1), as some devices' kernels have it."""
    close(f"{after}: norm.running_mean", weights["norm.running_mean"], norm.running_mean, 1e-4)
    initial = (1 - norm.momentum) ** steps
    biased = initial + (norm.running_var - initial) * (samples - 1) / samples
    expected = biased if torch.allclose(weights["norm.running_var"], biased, 1e-4, 1e-4) else norm.running_var
    close(f"{after}: norm.running_var", weights["norm.running_var"], expected, 1e-4)


class _Table(Regression):
    """Model that looks rows up, and takes them shorter in its own weight, or divides their gradients."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(seed)
        self.table = nn.Embedding(4, 6, **options)
        nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(11))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        rows = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        return F.mse_loss(self(x + self.table(rows)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx)


class _Repeated(Regression):
    """Model with a buffer of one element that is repeated."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("repeated", torch.full((1,), float(seed)).expand(4))


@check("STR-58", since="0.2", world_sizes=(1, 2), after=("STR-14",))
def layers_that_write(rank: RankContext) -> None:
    """Embeddings with ``max_norm`` or ``scale_grad_by_freq`` train in one process as in plain torch, and are evaluated.

    A strategy may refuse to train them by a ModelError, on every rank: for several ranks, parameters in parts, or
    peers elsewhere. Otherwise a row's gradient is divided by how often the joined batch looks it up. A buffer that
    repeats one element is rank 0's after the set-up.

    Why: each rank takes the rows of its own samples shorter, and replicas diverge; a check for it refused evaluation.
    Fix: refuse only a training on several replicas.
    """
    require_steps_of_the_loop(rank)
    with running(rank, _Table(), may_refuse=True) as run:
        run.train(0, 1)
    for options in ({"max_norm": 0.5}, {"scale_grad_by_freq": True}):
        told = f"an embedding with {next(iter(options))}"
        with refused_alike(rank, told, ModelError), running(rank, _Table(**options)) as run:
            run.train(0, 2)
            if rank.size == 1 or "scale_grad_by_freq" in options:
                run.require_weights(f"after two steps of {told}", reference(rank, 2, model=_Table(**options))[0])
            elif getattr(rank.component.cls, "compares_replicas", False):
                run.strategy.check_replicas()
        with rank.set_up_strategy() as strategy:
            strategy.connect(_Table(**options))
            strategy.setup_model(training=False)
            if not strategy.evaluation_communicates:
                with torch.no_grad():
                    loss = strategy.step_function("validation_step")(share(strategy, batch(rank, 0)), 0)
                require(torch.isfinite(loss), f"the loss of an evaluation of {told} is {loss}")
            rank.gather("evaluated")
    with running(rank, _Repeated(rank.rank), may_refuse=True) as run:
        got = dict(run.module.named_buffers())["repeated"]
        same("the shape of a buffer that repeats one element", tuple(got.shape), (4,))
        close("a buffer that repeats one element, after the set-up", got, torch.zeros(4), 0.0)
        rank.gather("done")
