"""STR-76 to STR-81, STR-86 and STR-88: later calls and lives, parts of states, and steps that fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from torchhal.errors import CheckpointMismatchError, TorchhalError
from torchhal.precision import SinglePrecision
from torchhal.strategies import StepResult, Strategy
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import (
    Regression,
    batch,
    reference,
    require_several_ranks,
    running,
    share,
)
from torchhal_conformance.checks.strategy_lifecycle import group_of_the_user
from torchhal_conformance.checks.strategy_optimizers import setup_several, two_optimizers


@check("STR-76", since="0.2", world_sizes=(2,), after=("STR-01",))
def compared_each_time(rank: RankContext) -> None:
    """``reduce`` is an error on every rank where structures, dtypes or shapes differ, also after calls that agreed.

    Why: metrics that agreed in the first step and differ in a later one are added up byte by byte, without an error.
    Fix: compare in every call; one small message says whether all are alike.
    """
    require_several_ranks(rank)
    here = rank.rank == 0
    with rank.set_up_strategy() as strategy:
        device = strategy.root_device
        different: dict[str, Callable[[], Any]] = {
            "keys": lambda: {"loss" if here else "accuracy": torch.ones(2, device=device)},
            "dtypes": lambda: torch.ones(2, dtype=torch.float32 if here else torch.int32, device=device),
            "shapes": lambda: torch.ones((4, 1) if here else (2, 2), device=device),
            "lengths": lambda: [torch.ones(2, device=device)] * (2 if here else 3),
        }
        for told, make in different.items():
            for _ in range(3):
                got = strategy.reduce({"loss": torch.ones(2, device=device)}, "sum")
                close("a sum of ones over two ranks", got["loss"], [2.0, 2.0], 1e-6)
            outcome = ""
            try:
                outcome = f"returned {strategy.reduce(make(), 'sum')!r}"
            except TorchhalError:
                pass
            except Exception as error:
                outcome = f"raised {type(error).__name__}: {error}"
            told_all = rank.gather(outcome)
            wrong = "; ".join(f"rank {number} {one}" for number, one in enumerate(told_all) if one)
            require(
                not wrong, f"reduce of other {told} on each rank must raise DistributedError on every rank: {wrong}"
            )


@check("STR-77", since="0.2", world_sizes=(1, 2), after=("STR-14", "STR-25"))
def part_of_the_weights(rank: RankContext) -> None:
    """load_module_state_dict(strict=False) of a part changes values, not parameters; the optimizer trains on them.

    What was given isn't changed by the steps that follow.

    Why: new parameters in the module are trained by nobody, and the loss of the other layers still falls.
    Fix: copy into the parameters that are there; no assign=True.
    """
    part = {name: value.clone() for name, value in Regression(5).state_dict().items() if name.startswith("body.0")}
    plain = Regression()
    plain.load_state_dict(part, strict=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(2):
        optimizer.zero_grad()
        plain.training_step(batch(rank, number), number).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with running(rank, Regression()) as run:
        given = {name: value.clone() for name, value in part.items()}
        run.strategy.load_module_state_dict(given, strict=False)
        run.train(0, 2)
        run.require_weights("after a part was loaded, and two steps", plain)
        for name, value in part.items():
            same(f"{name} of the state that was given, after two steps", given[name].cpu(), value)


class _Noise(Regression):
    """A model with a buffer that no state dict has."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        generator = torch.Generator().manual_seed(100 + seed)
        self.register_buffer("noise", torch.randn(6, generator=generator), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self(x + self.noise), y)


@check("STR-78", since="0.2", world_sizes=(2, 3), after=("STR-13",))
def buffers_that_are_not_saved(rank: RankContext) -> None:
    """After the set-up buffers with persistent=False are those of rank 0 on all ranks, as all others are.

    Why: random features that differ between the ranks average gradients of different models.
    Fix: broadcast module.buffers(), not module.state_dict().
    """
    expected = _Noise(0).noise
    with running(rank, _Noise(rank.rank)) as run:
        for told in ("after the set-up", "after a step"):
            same(f"a buffer with persistent=False {told}", run.module.noise.cpu(), expected)
            run.train(0, 1)


class _Skips(SinglePrecision):
    """A precision that skips each second step, as after an overflow."""

    calls = 0

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> bool:
        self.calls += 1
        return super().optimizer_step(optimizer, closure) if self.calls % 2 else False


@check("STR-79", since="0.2", world_sizes=(1, 2), after=("STR-36",))
def steps_that_were_skipped(rank: RankContext) -> None:
    """optimizer_step says that nothing was updated where the precision skipped the step, and counts the step.

    Why: a warm-up is over before the first update where schedulers step for updates that were never made.
    Fix: return StepResult.of what the precision has returned.
    """
    precision = _Skips()
    with running(rank, Regression(), strategy=rank.create_strategy(precision=precision)) as run:
        strategy = run.strategy
        for number in range(4):
            strategy.zero_grad(run.optimizer)
            strategy.backward(run.step(share(strategy, batch(rank, number)), number))
            before = precision.calls
            got = StepResult.of(strategy.optimizer_step(run.optimizer))
            if precision.calls == before:
                raise NotApplicable("the strategy doesn't step through the precision")
            same(f"whether step {number} has updated parameters", got.updated, number % 2 == 0)
            same(f"how many steps step {number} counts", got.steps, 1)


class _Counted(SinglePrecision):
    """A precision that counts how often its context is entered now."""

    depth = 0

    def forward_context(self) -> AbstractContextManager[None]:
        return _Entered(self)


class _Entered(AbstractContextManager[None]):
    """A context that is left by ``__exit__`` alone; a generator would be, too, when Python collects it."""

    def __init__(self, precision: _Counted) -> None:
        self.precision = precision

    def __enter__(self) -> None:
        self.precision.depth += 1

    def __exit__(self, *error: object) -> None:
        self.precision.depth -= 1


class _FailsOnce(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise ArithmeticError("a bad batch")
        return super().training_step(batch, batch_idx)


@check("STR-80", since="0.2", world_sizes=(1, 2), after=("STR-36",))
def step_that_raises(rank: RankContext) -> None:
    """A step that raises leaves the precision's context, and the steps after it are as ever.

    Why: after an out-of-memory error that was caught everything else in the process runs under autocast.
    Fix: a with statement around the step.
    """
    precision = _Counted()
    plain = Regression()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with running(rank, _FailsOnce(), strategy=rank.create_strategy(precision=precision)) as run:
        for number in range(3):
            data = share(run.strategy, batch(rank, number))
            run.strategy.zero_grad(run.optimizer)
            if number == 1:
                raises("a step that raises", ArithmeticError, lambda data=data: run.step(data, 1))  # type: ignore[misc]
            else:
                run.strategy.backward(run.step(data, number))
                run.strategy.optimizer_step(run.optimizer)
                optimizer.zero_grad()
                plain.training_step(batch(rank, number), number).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            same(f"how often the precision's context is entered after step {number}", precision.depth, 0)
        run.require_weights("after a step that raised, and another one", plain)


@check("STR-81", since="0.2", world_sizes=(1, 2), after=("STR-22",))
def two_schedulers(rank: RankContext) -> None:
    """load_scheduler_state restores the scheduler that it is given, of two of one class too, and no other one.

    A scheduler that chains others, or waits for a metric, takes its own state; a number in place of a word is refused.

    Why: of a GAN's two schedules the first one got both states, and the second one began anew.
    Fix: load into config.scheduler.
    """
    if rank.component.declared & {"owns_step", "owns_schedulers"}:
        raise NotApplicable("the strategy has schedulers of its own")
    with rank.set_up_strategy() as strategy:
        optimizers = two_optimizers(strategy)
        schedulers = [torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5) for one in optimizers]
        setup_several(rank, strategy, optimizers, [SimpleNamespace(scheduler=one) for one in schedulers])
        configs = strategy.lr_scheduler_configs
        states = []
        for number, config in enumerate(configs):
            state = strategy.scheduler_state(config)
            states.append({**state, "last_epoch": 3 + number, "_last_lr": [0.01 * (1 + number)]})
        for config, state in reversed(list(zip(configs, states, strict=True))):
            strategy.load_scheduler_state(config, dict(state))
        for number, config in enumerate(configs):
            found = strategy.scheduler_state(config)
            same(f"the position of scheduler {number} after a load", found["last_epoch"], 3 + number)
            close(f"the rates of scheduler {number} after a load", found["_last_lr"], [0.01 * (1 + number)], 1e-9)
        lr_scheduler, optimizer = torch.optim.lr_scheduler, strategy.optimizers[0]
        steps = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, step_size=1)]
        chained = SimpleNamespace(scheduler=lr_scheduler.SequentialLR(optimizer, steps, milestones=[2]))
        plateau = SimpleNamespace(scheduler=lr_scheduler.ReduceLROnPlateau(optimizer))
        for config in (chained, plateau):
            strategy.load_scheduler_state(config, copy.deepcopy(strategy.scheduler_state(config)))
        wrong = {**strategy.scheduler_state(plateau), "mode": 3}
        told = "load_scheduler_state with mode=3"
        raises(told, CheckpointMismatchError, lambda: strategy.load_scheduler_state(plateau, wrong), "mode")


@check("STR-86", since="0.2", world_sizes=(2,), after=("STR-39",))
def groups_that_are_left(rank: RankContext) -> None:
    """teardown() leaves no process group of the strategy's behind, where the user's own group stays too.

    Why: each run leaves a group with its threads and connections; hundreds of them end in "too many open files".
    Fix: destroy in teardown() what the set-up has made.
    """
    require_several_ranks(rank)
    with group_of_the_user(rank):
        before = _groups()
        for life in (1, 2):
            try:
                with running(rank) as run:
                    run.train(0, 1)
                    _sum_and_decide(run.strategy, rank.size)
            except NotApplicable:
                with rank.set_up_strategy() as strategy:
                    _sum_and_decide(strategy, rank.size)
            left = _groups() - before
            require(left == 0, f"{left} process group(s) are left after teardown() of life {life}")


def _sum_and_decide(strategy: Strategy, size: int) -> None:
    got = strategy.reduce(torch.ones(1, device=strategy.root_device), "sum")
    close("a sum over the user's group", got, [size], 1e-6)
    strategy.reduce_boolean_decision(True)


@check("STR-88", since="0.2", world_sizes=(1, 2), after=("STR-14", "STR-31"))
def another_module(rank: RankContext) -> None:
    """A strategy that is set up again with another module trains that one, and leaves the first as it was.

    Why: functions, wrappers or lists of parameters that are kept from the first run train a model that nobody looks at.
    Fix: make in the set-up what belongs to the module.
    """
    strategy, first = rank.create_strategy(), Regression(1)
    with running(rank, first, strategy=strategy) as run:
        run.train(0, 1)
        before = run.weights()
        strategy.restore_module()
    second = Regression(0)
    with running(rank, second, strategy=strategy) as run:
        run.train(0, 2)
        run.require_weights("of the second module after two steps", reference(rank, 2)[0])
    for name, value in first.state_dict().items():
        if name in before and not value.is_meta:  # a rank that isn't rank 0 may have none
            told = f"{name} of the first module, after steps of the second"
            same(told, value.detach().cpu(), before[name].to(value.dtype))


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)
