"""STR: accumulations that a checkpoint interrupts, evaluation without training, and the end of a run."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.nn import functional as F

from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import (
    TOLERANCE,
    Regression,
    StrategyRun,
    batch,
    make_model,
    reference,
    running,
    share,
    tolerance_of,
    values,
    weights_close,
)
from torchhal_conformance.checks._strategy_state import load_rank_state, states_of_ranks

PARTS = 3


@check("STR-60", since="0.2", world_sizes=(1, 2), after=("STR-15",))
def interrupted_accumulation(rank: RankContext) -> None:
    """accumulated_gradients() returns on every rank what was accumulated on all; another object continues from it.

    They are tensors on the CPU by the names of the parameters, and state_dict() has what else the step needs. The
    accumulation goes on after the call too, and after a load, which leaves what it is given as it was. A strategy whose
    engine keeps the gradients returns none, and warns on rank 0 that a resumed run steps without them.

    Why: a checkpoint in the middle of an accumulation loses the gradients of a part of the batch.
    Fix: average what no_backward_sync() kept back, in sync_gradients().
    """
    plain = Regression()
    x, y = batch(rank, 0)
    for part in range(PARTS - 1):
        rows = slice(4 * part, 4 * part + 4)
        (F.mse_loss(plain(x[rows]), y[rows]) / PARTS).backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with running(rank) as run:
        _accumulate(rank, run, 0, PARTS - 1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            kept = run.strategy.accumulated_gradients()
        if not any(rank.gather(kept)):
            require(rank.rank or told, "accumulated_gradients() returned none, and gave no warning on rank 0")
            raise NotApplicable("the strategy's engine keeps the gradients, and a warning says so")
        state = run.strategy.state_dict()
        # weights are off by a lossy strategy's tolerance after steps of 0.1 times the gradients
        tolerance = max(TOLERANCE, tolerance_of(run.strategy, "weights", 0.0) / 0.1)
        same("the names of the gradients", sorted(kept), sorted(expected))
        for name, gradient in kept.items():
            same(f"the device of {name}'s gradient", gradient.device.type, "cpu")
            close(f"the accumulated gradient of {name}", gradient, expected[name], tolerance)
        ranks = states_of_ranks(rank, run.strategy)
        kept = {name: gradient.clone() for name, gradient in kept.items()}
        _accumulate(rank, run, PARTS - 1, PARTS)
        run.strategy.optimizer_step(run.optimizer)
        run.require_weights("after the interrupted step", reference(rank, 1)[0])
    with running(rank) as run:
        run.strategy.load_state_dict(rank.gather(state)[0])
        given = rank.gather(kept)[0]
        run.strategy.load_accumulated_gradients(given)
        load_rank_state(rank, run.strategy, ranks)
        _accumulate(rank, run, PARTS - 1, PARTS)
        run.strategy.optimizer_step(run.optimizer)
        run.require_weights("after the continued step", reference(rank, 1)[0])
        same("the gradients that load_accumulated_gradients() was given, a step later", given, rank.gather(kept)[0])


def _accumulate(rank: RankContext, run: StrategyRun, first: int, end: int) -> None:
    """Run forward and backward of these micro-batches; the last of all communicates."""
    strategy = run.strategy
    paused = strategy.no_backward_sync()
    if first == 0:
        strategy.zero_grad(run.optimizer)
    for part in range(first, end):
        data = share(strategy, tuple(tensor[4 * part : 4 * part + 4] for tensor in batch(rank, 0)))
        with contextlib.nullcontext() if paused is None or part == PARTS - 1 else paused:
            strategy.backward(run.step(data, part) / PARTS)


@check("STR-61", since="0.2", world_sizes=(1, 2), after=("STR-13",))
def evaluation_alone(rank: RankContext) -> None:
    """setup_model(training=False) gives all ranks the parameters and buffers of rank 0 too, and a step works.

    Why: a test run whose ranks have models of their own reports a mixture of them.
    Fix: broadcast before the wrapper, whether there is one or not.
    """
    with rank.set_up_strategy() as strategy:
        module = make_model(rank, rank.rank)
        strategy.connect(module)
        strategy.setup_model(training=False)
        first, got = make_model(rank), values(strategy)
        if not strategy.is_global_zero and got:
            got = {**first.state_dict(), **got}  # a stage or shard has its own part
        weights_close(f"rank {rank.rank} beside rank 0", got, first, 0.0)
        if rank.component.declared & {"owns_step", "owns_backward"}:
            return  # its training step is none without a backward
        with torch.no_grad():
            loss = strategy.step_function("training_step")(share(strategy, batch(rank, 0)), 0)
        mean = float(strategy.reduce(loss, "mean"))
        close("the loss of an evaluation", torch.tensor(mean), first.training_step(batch(rank, 0), 0), TOLERANCE)


@check("STR-62", since="0.2", world_sizes=(1, 2))
def teardown_of_all(rank: RankContext) -> None:
    """teardown() tears down every component even when one fails, raises its error, and leaves the model unwrapped.

    Why: a precision whose default dtype stays, since a checkpoint IO failed, changes the next run.
    Fix: an ExitStack in teardown(), and super().teardown() in it.
    """
    for broken in ("precision", "checkpoint_io", "accelerator"):
        strategy = rank.create_strategy()
        strategy.setup_environment()
        module = make_model(rank)
        strategy.connect(module)
        strategy.setup_model()
        torn: set[str] = set()
        components = {name: getattr(strategy, name) for name in ("accelerator", "checkpoint_io", "precision")}
        for name, component in components.items():
            vars(component)["teardown"] = _recorded(name, component.teardown, torn, broken)
        told = f"teardown() with a {broken} whose teardown() fails"
        raises(told, RuntimeError, strategy.teardown, f"the {broken} is broken")
        left = sorted(set(components) - torn)
        require(not left, f"{told} must tear down the rest too (left: {', '.join(left)})")
        require(strategy.model is module, f"the model is still wrapped after {told}")
        for component in components.values():
            del vars(component)["teardown"]
        strategy.teardown()
        rank.gather("done")


def _recorded(name: str, teardown: Any, torn: set[str], broken: str) -> Any:
    def call() -> None:
        torn.add(name)
        teardown()
        if name == broken:
            raise RuntimeError(f"the {broken} is broken")

    return call


@check("STR-63", since="0.2", world_sizes=(1, 2), after=("STR-09",))
def gathered_tensor(rank: RankContext) -> None:
    """What all_gather returns is a new tensor, without a graph unless sync_grads asks for one.

    Why: a metric that keeps every step's graph runs out of memory.
    Fix: detach before the collective.
    """
    with rank.set_up_strategy() as strategy:
        tensor = torch.full((2,), float(rank.rank), device=strategy.root_device, requires_grad=True)
        gathered = strategy.all_gather(tensor * 1)
        require(not gathered.requires_grad, "the tensors gathered without sync_grads have a graph")
        given = tensor.detach().clone()
        strategy.all_gather(given).fill_(9.0)
        close("the tensor after what was gathered was written to", given, torch.full((2,), float(rank.rank)), 0.0)
        rank.gather("done")
