"""STR-68: states of optimizers and schedulers that are like this one's, and those that only look so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

from torchhal.errors import CheckpointMismatchError, TorchhalError
from torchhal_conformance._assertions import raises, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import StrategyRun, batch, refused_alike, running, share


def _option(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["param_groups"][0][name] = value

    return change


def _entry(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["state"][0][name] = value

    return change


def _numbered(number: int, entry: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["state"][number] = entry

    return change


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "without its param_groups": lambda state: state.pop("param_groups"),
    "without its state": lambda state: state.pop("state"),
    "without an option": lambda state: state["param_groups"][0].pop("eps"),
    "with None for a beta": _option("betas", (None, 0.9)),
    "with a text for a beta": _option("betas", ("0.9", 0.9)),
    "with a number for the betas": _option("betas", 0.9),
    "with a beta beyond 1": _option("betas", (0.9, 1.5)),
    "with a NaN for the rate": _option("lr", math.nan),
    "with a switch for the rate": _option("lr", True),
    "with a number for a switch": _option("amsgrad", 3),
    "with a text for an option without a value": _option("foreach", "fast"),
    "with a negative decay": _option("weight_decay", -1.0),
    "of a parameter that isn't there": _numbered(99, {}),
    "with a list for a parameter": _numbered(0, []),
    "without the moments": lambda state: state["state"][0].pop("exp_avg"),
    "with a number for a moment": _entry("exp_avg", 0.0),
    "with a step of -1": _entry("step", torch.tensor(-1.0)),
    "with an infinite step": _entry("step", torch.tensor(math.inf)),
    "with a text for the step": _entry("step", "one"),
}
"""States that can't be Adam's, whose constructor would refuse their options, or whose step would raise."""

RIGHT: dict[str, Callable[[dict[str, Any]], None]] = {
    "as it was saved": lambda state: None,
    "before the first step": lambda state: state["state"].clear(),
    "without that of a parameter that had no gradient": lambda state: state["state"].pop(0),
    "with another rate": _option("lr", 3.0),
    "with a rate that a schedule has made 0": _option("lr", 0.0),
    "with a tensor for the rate": _option("lr", torch.tensor(0.25)),
    "with a switch that had no value": _option("foreach", False),
    "with a list for the betas": _option("betas", [0.8, 0.9]),
    "with a whole number for a fraction": _option("weight_decay", 0),
    "with a number for the step": _entry("step", 4),
}
"""States that this Adam can have had."""


@check("STR-68", since="0.2", world_sizes=(1, 2), after=("STR-65",))
def states_alike(rank: RankContext) -> None:
    """check_optimizer_state and check_scheduler_state refuse what can't be a state of this object, and nothing else.

    What the optimizer's hooks make of a state counts. Neither changes the state.

    Why: a check by types alone lets betas of None through, and refuses the rate that a schedule has made a tensor.
    Fix: call the inherited methods, or compare options, numbers and shapes with those that the optimizer makes.
    """
    with running(rank, make=torch.optim.Adam) as run:
        run.train(0, 1)
        kept = rank.gather(run.strategy.optimizer_state(run.optimizer))[0]
        if not {"state", "param_groups"} <= kept.keys():
            raise NotApplicable("the state is not of torch's form, or is on another rank")
        for what, change in WRONG.items():
            state = copy.deepcopy(kept)
            change(state)
            call = lambda state=state: run.strategy.check_optimizer_state(run.optimizer, state)  # noqa: E731
            raises(f"check_optimizer_state of a state {what}", CheckpointMismatchError, call)
        for what, change in RIGHT.items():
            state = copy.deepcopy(kept)
            change(state)
            _accepted(run, state, what)
        if type(run.optimizer) is torch.optim.Adam and "owns_optimizer_state" not in run.strategy.features:
            _through_hooks(run, kept)
        if not rank.component.declared & {"owns_step", "owns_schedulers"}:
            _schedulers(run)
        rank.gather("done")
    _without_example(rank)


def _accepted(run: StrategyRun, state: dict[str, Any], what: str) -> None:
    before = copy.deepcopy(state)
    try:
        run.strategy.check_optimizer_state(run.optimizer, state)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise CheckFailed(f"check_optimizer_state of a state {what} must not raise (got {told})") from error
    same(f"a state {what} after it was checked", state, before)


def _through_hooks(run: StrategyRun, kept: dict[str, Any]) -> None:
    """Check that a state is what the optimizer's hooks make of it, and that they don't change the one given."""

    def renamed(_: Any, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            if "rate" in group:
                group["lr"] = group.pop("rate")

    def raising(_: Any, state: dict[str, Any]) -> None:
        raise LookupError("too old")

    old = copy.deepcopy(kept)
    for group in old["param_groups"]:
        group["rate"] = group.pop("lr")
    handle = run.optimizer.register_load_state_dict_pre_hook(renamed)
    _accepted(run, old, "that a hook of the optimizer converts")
    handle.remove()
    handle = run.optimizer.register_load_state_dict_pre_hook(raising)
    call = lambda: run.strategy.check_optimizer_state(run.optimizer, copy.deepcopy(kept))  # noqa: E731
    raises("check_optimizer_state of a state that a hook refuses", CheckpointMismatchError, call)
    handle.remove()


class _Warmup(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the user's, whose attributes grow."""

    def __init__(self, optimizer: Any) -> None:
        self.best: float | None = None
        self.seen: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]


def _schedulers(run: StrategyRun) -> None:
    """Check the states of a scheduler of torch's and of one of the user's."""
    made: Any = torch.optim.lr_scheduler
    steps, own = made.StepLR(run.optimizer, step_size=2, gamma=1.0), _Warmup(run.optimizer)
    strategy = run.strategy
    for scheduler, name, value, right in (
        (steps, "gamma", 0.5, True),
        (steps, "last_epoch", 3, True),
        (steps, "step_size", 1.5, False),
        (steps, "last_epoch", 0.5, False),
        (steps, "gamma", "half", False),
        (steps, "base_lrs", [0.1, 0.1], False),
        (own, "best", 0.5, True),
        (own, "seen", [0.1, 0.2], True),
        (own, "base_lrs", [0.1, 0.1], False),
    ):
        config, state = SimpleNamespace(scheduler=scheduler), {**copy.deepcopy(scheduler.state_dict()), name: value}
        told = f"check_scheduler_state of a {type(scheduler).__name__} with {name}={value!r}"
        if not right:
            call = lambda config=config, state=state: strategy.check_scheduler_state(config, state)  # noqa: E731
            raises(told, CheckpointMismatchError, call)
            continue
        try:
            strategy.check_scheduler_state(config, state)
        except Exception as error:
            raise CheckFailed(f"{told} must not raise (got {type(error).__name__}: {error})") from error


def _without_example(rank: RankContext) -> None:
    """Check the state of an optimizer that makes no step without a closure; a strategy may refuse such a one."""

    def lbfgs(parameters: Any, lr: float) -> Any:
        return torch.optim.LBFGS(parameters, lr=lr, max_iter=2)

    with rank.set_up_strategy() as strategy:
        with refused_alike(rank, "LBFGS", (TorchhalError, TypeError, NotApplicable)) as refusal:
            run = StrategyRun(rank, strategy, make=lbfgs)
        if refusal.reason:
            return

        def closure() -> torch.Tensor:
            strategy.zero_grad(run.optimizer)
            loss: torch.Tensor = run.step(share(strategy, batch(rank, 0)), 0)
            strategy.backward(loss)
            return loss

        with suppress(TorchhalError):
            strategy.optimizer_step(run.optimizer, closure)
            state = rank.gather(strategy.optimizer_state(run.optimizer))[0]
            if {"state", "param_groups"} <= state.keys():
                _accepted(run, state, "of LBFGS")
        rank.gather("done")
