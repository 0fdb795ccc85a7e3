"""STR: parameters that are frozen during a run, and optimizer states that belong to something else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchhal.errors import CheckpointMismatchError, TorchhalError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import Regression, batch, running

FROZEN = ((), ("body.0",), ("body.0", "body.2", "body.4"), ("body.2", "body.4"), ())
"""The layers that are frozen in the steps of one number; where all are, no step is made."""


def _freeze(module: nn.Module, layers: tuple[str, ...]) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(layers) if layers else True)


@check("STR-64", since="0.2", world_sizes=(1, 2), after=("STR-14",))
def frozen_during_the_run(rank: RankContext) -> None:
    """Parameters that are frozen after the set-up, and trained again later, make the steps that plain torch makes.

    Or they are an error of torchhal's on every rank.

    Why: fine-tuning unfreezes layers later, and a wrapper that did not see them leaves their gradients to each rank.
    Fix: let the wrapper be about the parameters that are trained, and renew it when these change.
    """
    plain = Regression()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with running(rank) as run:
        for number, layers in enumerate(FROZEN):
            _freeze(run.module, layers)
            _freeze(plain, layers)
            if len(layers) > 1:
                continue
            refused = ""
            try:
                run.train(2 * number, 2 * number + 2)
            except TorchhalError as error:
                refused = str(error)
            if all(rank.gather(refused)):
                raise NotApplicable(f"the strategy refuses parameters that are frozen in its run ({refused})")
            require(not refused, f"a rank refused parameters that are frozen in its run, others didn't: {refused}")
            for step in (2 * number, 2 * number + 1):
                optimizer.zero_grad()
                plain.training_step(batch(rank, step), step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            run.require_weights(f"with {layers or 'no layers'} frozen", plain)


def _without_group(state: dict[str, Any]) -> None:
    state["param_groups"].pop()


def _one_parameter_less(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def _another_shape(state: dict[str, Any]) -> None:
    name, value = next((n, v) for n, v in state["state"][0].items() if isinstance(v, torch.Tensor) and v.dim())
    state["state"][0][name] = torch.zeros(*value.shape, 2)


def _text_for_a_number(state: dict[str, Any]) -> None:
    state["param_groups"][0]["lr"] = "much"


def _one_beta(state: dict[str, Any]) -> None:
    state["param_groups"][0]["betas"] = (0.9,)


def _nothing(state: dict[str, Any]) -> None:
    state.clear()


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "with a group less": _without_group,
    "with a parameter less": _one_parameter_less,
    "with a tensor of another shape": _another_shape,
    "with a text for the rate": _text_for_a_number,
    "with one beta": _one_beta,
    "that is empty": _nothing,
}


@check("STR-65", since="0.2", world_sizes=(1, 2))
def state_of_something_else(rank: RankContext) -> None:
    """A state that can't be this optimizer's is a CheckpointMismatchError, and nothing changes.

    Why: a state that fits by chance trains on with another model's moments.
    Fix: compare groups, numbers of parameters, shapes and types in check_optimizer_state().
    """
    with running(rank, make=torch.optim.Adam) as run:
        run.train(0, 1)
        kept = rank.gather(run.strategy.optimizer_state(run.optimizer))[0]  # as a checkpoint has it, on every rank
        if not {"state", "param_groups"} <= kept.keys():
            raise NotApplicable("the state is not of torch's form, or is on another rank")
        before = copy.deepcopy(run.optimizer.state_dict())
        for what, change in CHANGES.items():
            state = copy.deepcopy(kept)
            change(state)
            for call in (run.strategy.check_optimizer_state, run.strategy.load_optimizer_state):
                told = f"{call.__name__} of a state {what}"
                raises(told, CheckpointMismatchError, lambda call=call, state=state: call(run.optimizer, state))  # type: ignore[misc]
        same("the optimizer's state after what was refused", run.optimizer.state_dict(), before)
        run.strategy.check_optimizer_state(run.optimizer, kept)
        run.strategy.load_optimizer_state(run.optimizer, kept)
        rank.gather("done")
