"""STR-70 to STR-75, STR-95, STR-97: norms, small, gathered and sparse gradients, gradients of some parameters only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchhal.capabilities import LOSS_SCALING
from torchhal.errors import ConfigurationError, TorchhalError
from torchhal.precision import SinglePrecision
from torchhal.resolve import check_fit, composition_of
from torchhal_conformance._assertions import close, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import WORLD_SIZES, RankContext
from torchhal_conformance.checks._strategy_run import (
    Regression,
    StrategyRun,
    batch,
    clipping,
    reference,
    refused_alike,
    require_gradients,
    require_several_ranks,
    require_steps_of_the_loop,
    running,
    share,
    tolerance_of,
)
from torchhal_conformance.checks.strategy_optimizers import setup_several, two_optimizers


def require_whole_parameters(run: StrategyRun) -> None:
    """Raise NotApplicable where a rank has parts of parameters, and all ranks must use the same of them."""
    if any(type(parameter) is not nn.Parameter for parameter in run.module.parameters()):
        raise NotApplicable("the parameters are divided among the ranks, which must all use the same of them")


def _gradients_of_the_joined_batch(rank: RankContext) -> tuple[Regression, tuple[torch.Tensor, ...], float]:
    """Return the plain model with the gradients of the first batch, that batch, and the 2-norm of the gradients."""
    plain, data = Regression(), batch(rank, 0)
    plain.training_step(data, 0).backward()  # type: ignore[no-untyped-call]
    return plain, data, float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))


@check("STR-70", since="0.2", world_sizes=(1, 2, 3), after=("STR-14",))
def norm_of_gradients(rank: RankContext) -> None:
    """grad_norm is the 2-norm of the gradient of the joined batch, on every rank, and changes no gradient.

    It changes none where the squares overflow and the norm is infinite, either.

    Why: a norm that is added up over replicas grows with the number of ranks, and so does the clipping by it.
    Fix: add up the squares of what this rank alone has; a replica has all of them.
    """
    plain, (x, y), expected = _gradients_of_the_joined_batch(rank)
    with running(rank, Regression()) as run:
        run.strategy.zero_grad(run.optimizer)
        run.strategy.backward(run.step(share(run.strategy, (x, y)), 0))
        tolerance = tolerance_of(run.strategy, "gradient_norm", 1e-4)
        for told in ("", ", asked again,"):
            with clipping(rank):
                norm = run.strategy.grad_norm(run.optimizer)
            same(f"the shape of the norm{told}", tuple(norm.shape), ())
            close(f"the norm of the gradients{told}", float(norm) / expected, 1.0, tolerance)
        run.strategy.optimizer_step(run.optimizer)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        run.require_weights("after a step whose norm was asked for", plain)
    if "lossy" in rank.component.declared:
        return
    with running(rank, Regression(), lr=1e-25) as run:
        run.strategy.zero_grad(run.optimizer)
        run.strategy.backward(run.step(share(run.strategy, (x, y)), 0) * 1e24)
        run.strategy.grad_norm(run.optimizer)
        run.strategy.optimizer_step(run.optimizer)
        run.require_weights("after a step whose infinite norm was asked for", plain)


class _Scales(SinglePrecision):
    """A precision that scales the loss, and divides gradients once by the scale, before the step at the latest."""

    features = frozenset({"scales_loss"})
    SCALE = 1024.0
    backwards = 0
    scaled = False

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.backwards += 1
        self.scaled = True
        super().backward(loss * self.SCALE, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        if self.scaled:
            self.scaled = False
            for parameter in self.main_params(optimizer):
                if parameter.grad is not None:
                    parameter.grad.div_(self.SCALE)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> bool:
        self.unscale_gradients(optimizer)
        return super().optimizer_step(optimizer, closure)


@check("STR-95", since="0.2", world_sizes=(1, 2), after=("STR-70",))
def norm_of_scaled_gradients(rank: RankContext) -> None:
    """grad_norm is that of the gradients without the precision's scale, and the step after it is right.

    So is the norm that clip_gradients returns, and clips by.

    Why: in 16-mixed the norm that hooks see is 65536 times too large; a rule that skips steps with a large norm skips
    every step.
    Fix: call unscale_gradients(optimizer) first.
    """
    for clips in (False, True):
        _step_with_a_norm(rank, clips)


def _step_with_a_norm(rank: RankContext, clips: bool) -> None:
    precision = _Scales()
    try:
        strategy = rank.create_strategy(precision=precision)
        check_fit("strategy", strategy, composition_of(strategy, rank.size))
    except ConfigurationError as error:
        raise NotApplicable(f"the strategy refuses a precision that scales the loss: {error}") from error
    if LOSS_SCALING in strategy.lacks:
        raise NotApplicable("the strategy carries no scaled loss")
    plain, (x, y), expected = _gradients_of_the_joined_batch(rank)
    with running(rank, Regression(), strategy=strategy) as run:
        run.strategy.zero_grad(run.optimizer)
        run.strategy.backward(run.step(share(run.strategy, (x, y)), 0))
        if not precision.backwards:
            raise NotApplicable("the strategy doesn't go back through the precision")
        with clipping(rank):
            if clips:
                told: Any = run.strategy.clip_gradients(run.optimizer, expected / 2)
                nn.utils.clip_grad_norm_(plain.parameters(), expected / 2)
            else:
                told = run.strategy.grad_norm(run.optimizer)
        tolerance = tolerance_of(run.strategy, "gradient_norm", 1e-4)
        name = "clip_gradients" if clips else "grad_norm"
        close(f"the norm of gradients of a scaled loss, by {name}", float(told) / expected, 1.0, tolerance)
        run.strategy.optimizer_step(run.optimizer)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        run.require_weights(f"after {name} and a step of a scaled loss", plain)


@check("STR-71", since="0.2", world_sizes=WORLD_SIZES, after=("STR-11",))
def gradients_beside_a_gather(rank: RankContext) -> None:
    """The backward of all_gather(sync_grads=True) adds up what the losses of all ranks have for the gathered tensor.

    It changes no other gradient. It applies to a strategy that passes gradients back.

    Why: a contrastive loss over the embeddings of all ranks trained by each rank's own part alone; or what was added to
    the gathered tensor got the gradients of all ranks.
    Fix: add up into a copy: autograd gives one tensor to several functions.
    """
    with rank.set_up_strategy() as strategy:
        device, n = strategy.root_device, rank.size
        weights = torch.arange(1.0, 2 * n + 1, device=device).reshape(n, 2)
        for told, order in (("before", False), ("behind", True)):
            mine = torch.full((2,), rank.rank + 1.0, device=device, requires_grad=True)
            other = torch.ones(n, 2, device=device, requires_grad=True)
            beside = other * 1.0
            gathered = strategy.all_gather(mine, sync_grads=True)
            if not gathered.requires_grad:
                raise NotApplicable("it passes no gradients back")
            both = gathered + beside if order else beside + gathered
            (both * weights).sum().backward()  # type: ignore[no-untyped-call]
            close(f"the gradient of what was added {told} the gathered tensor", other.grad, weights, 1e-6)
            close("the gradient of what was gathered", mine.grad, weights[rank.rank] * n, 1e-6)


class _Wide(nn.Module):
    """A model with a layer of 262144 weights, whose gradients are too small for float16."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 2))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05, generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.body(x), y) * 1e-9


@check("STR-72", since="0.2", world_sizes=(2,), after=("STR-14",))
def small_gradients_of_large_layers(rank: RankContext) -> None:
    """Gradients of a layer of 262144 weights, each of some 1e-11, are averaged as exactly as those of small layers.

    Why: a communication in float16 for large buckets alone is exact in each test, and loses what is below 6e-8.
    Fix: average in the gradients' dtype, or declare "lossy" with tolerances.
    """
    if "lossy" in rank.component.declared:
        raise NotApplicable("the strategy is lossy, as it declares")
    plain = _Wide()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e7)
    plain.training_step(batch(rank, 0), 0).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with running(rank, _Wide(), lr=1e7) as run:
        run.train(0, 1)
        for name, value in run.weights().items():
            change, expected = value - before[name], plain.state_dict()[name] - before[name]
            unit = float(expected.abs().max())
            close(f"the change of {name} (in units of {unit:.3g})", change / unit, expected / unit, 1e-3)


class _SumOfTables(nn.Module):
    """Two embeddings with sparse gradients and a layer, whose outputs are added up."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.words, self.places = nn.Embedding(4, 5, sparse=True), nn.Embedding(2, 5, sparse=True)
        self.layer, self.head = nn.Linear(6, 5), nn.Linear(5, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        words, places = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), (x[:, 2] > 0).long()
        return F.mse_loss(self.head(torch.tanh(self.words(words) + self.places(places) + self.layer(x))), y)


@check("STR-97", since="0.2", world_sizes=(2,), after=("STR-14",))
def sparse_gradients_of_a_sum(rank: RankContext) -> None:
    """Embeddings with ``sparse=True`` whose outputs are added up are trained as in one process, or refused.

    So is the layer whose output is added to them.

    Why: autograd gives the summands one gradient in one memory. DistributedDataParallel divides a sparse one there
    while backward still needs the others.
    Fix: let a hook on such a weight return ``gradient.clone()``; change no gradient in place before backward has ended.
    """
    require_several_ranks(rank)
    plain = _SumOfTables()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    plain.training_step(batch(rank, 0), 0).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with running(rank, _SumOfTables(), lr=0.5, may_refuse=True) as run:
        with refused_alike(rank, "sparse gradients") as refusal:
            run.train(0, 1)
        if refusal.reason:
            raise NotApplicable(f"the strategy refuses sparse gradients ({refusal.reason})")
        run.require_weights("after a step with sparse gradients of a sum", plain)


class _Experts(nn.Module):
    """Two layers of one size; each rank uses another one."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.experts = nn.ModuleList([nn.Linear(6, 2) for _ in range(2)])
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def loss(self, batch: Any, expert: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.experts[expert](x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


@check("STR-73", since="0.2", world_sizes=(2,), after=("STR-15", "STR-19"))
def ranks_of_other_branches(rank: RankContext) -> None:
    """sync_gradients averages each parameter's gradient with those of the same parameter, whichever a rank has.

    One that a rank hasn't used counts as zero there. Or it is an error on every rank. One that was frozen after its
    backward is averaged too.

    Why: gradients that are joined by their place in a list are those of another layer on another rank.
    Fix: average every parameter in one order, or compare first which of them have gradients.
    """
    require_several_ranks(rank)
    if "lossy" in rank.component.declared:
        raise NotApplicable("the strategy is lossy, as it declares")
    data = batch(rank, 0)
    plain = _Experts()
    for number in range(2):
        (plain.loss(tuple(tensor[number::2] for tensor in data), number) / 2).backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for frozen in (False, True):
        with running(rank, _Experts(), may_refuse=True) as run:
            require_whole_parameters(run)
            strategy, module = run.strategy, run.module
            rows = tuple(tensor.to(strategy.root_device)[rank.rank :: 2] for tensor in data)
            with refused_alike(rank, "other branches") as refusal:
                with strategy.no_backward_sync() or contextlib.nullcontext():
                    strategy.backward(module.loss(rows, rank.rank))
                if frozen:
                    module.requires_grad_(False)
                strategy.sync_gradients()
            if refusal.reason:
                raise NotApplicable(f"the strategy refuses ranks that use other parameters ({refusal.reason})")
            require_gradients(module)
            for name, parameter in module.named_parameters():
                told = f"the averaged gradient of {name}" + ", which is frozen now" * frozen
                close(told, parameter.grad, expected[name], run.tolerance)


@check("STR-74", since="0.2", world_sizes=(1, 2), after=("STR-19",))
def backward_of_some_inputs(rank: RankContext) -> None:
    """manual_backward(loss, inputs=...) gives gradients to these parameters, and to no others.

    backward(loss, through=...) calls that function once in the place of loss.backward.

    Why: the generator was trained by the discriminator's loss.
    Fix: pass on all arguments of backward.
    """
    _backward_of_the_module(rank)
    with running(rank, _Experts(), may_refuse=True) as run:
        require_whole_parameters(run)
        strategy, module = run.strategy, run.module
        rows = share(strategy, batch(rank, 0))
        loss = module.loss(rows, 0) + module.loss(rows, 1)
        first = list(module.experts[0].parameters())
        refused = ""
        try:
            strategy.manual_backward(loss, inputs=first)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
        if all(rank.gather(refused)):
            raise NotApplicable(f"the strategy refuses 'inputs' ({refused})")
        require(not refused, f"a rank refused 'inputs', others didn't: {refused}")
        require_gradients(module)
        require(all(one.grad is not None for one in first), "a parameter among 'inputs' has got no gradient")
        for name, parameter in module.experts[1].named_parameters():
            there = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
            require(not there, f"experts.1.{name} has got a gradient, though it isn't among 'inputs'")


def _backward_of_the_module(rank: RankContext) -> None:
    """Check a step whose backward pass is a function of the module's own."""
    calls: list[tuple[int, ...]] = []

    def through(loss: torch.Tensor) -> None:
        calls.append(tuple(loss.shape))
        loss.backward()  # type: ignore[no-untyped-call]

    with running(rank, Regression()) as run:
        run.strategy.zero_grad(run.optimizer)
        loss = run.step(share(run.strategy, batch(rank, 0)), 0)
        with refused_alike(rank, "a backward of the module's own", TorchhalError) as refusal:
            run.strategy.backward(loss, through=through)
        if not refusal.reason:
            same("the shapes of the losses with which 'through' was called", calls, [()])
            run.strategy.optimizer_step(run.optimizer)
            run.require_weights("after a step whose backward was the module's own", reference(rank, 1)[0])


@check("STR-75", since="0.2", world_sizes=(1, 2), after=("STR-22",))
def gradients_of_the_other_optimizer(rank: RankContext) -> None:
    """zero_grad(optimizer) clears the gradients of that optimizer's parameters, and leaves those of another one.

    Why: one that accumulates over several batches lost what it had, whenever the other one began its step.
    Fix: optimizer.zero_grad(), not that of the module.
    """
    require_steps_of_the_loop(rank)
    with rank.set_up_strategy() as strategy:
        setup_several(rank, strategy, two_optimizers(strategy))
        step = strategy.step_function("training_step")
        strategy.backward(step(share(strategy, batch(rank, 0)), 0))
        for cleared, kept in ((0, 1), (1, 0)):
            before = _with_gradients(strategy, kept)
            strategy.zero_grad(strategy.optimizers[cleared])
            if cleared == 0:
                same("which parameters of the other optimizer have a gradient", _with_gradients(strategy, kept), before)
            left = _with_gradients(strategy, cleared)
            require(not any(left), f"a gradient is left after zero_grad of optimizer {cleared}")


def _with_gradients(strategy: Any, number: int) -> list[bool]:
    """Return of each parameter of an optimizer whether it has a gradient that isn't zero."""
    parameters = [one for group in strategy.optimizers[number].param_groups for one in group["params"]]
    return [one.grad is not None and bool(one.grad.any()) for one in parameters]
