"""Describe the optimizers and schedulers that trained a run, and refuse their states to others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchhal.errors import CheckpointMismatchError


def describe(optimizers: Sequence[Any], configs: Sequence[Any], module: nn.Module) -> dict[str, Any]:
    """Return the classes of ``optimizers`` and schedulers, and the names in ``module`` of each group's parameters.

    An optimizer that saves its state in the form of another class, such as a vendor's fused AdamW, has that class as
    its attribute ``state_of``.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        "optimizers": [
            {
                "class": getattr(optimizer, "state_of", type(optimizer)).__qualname__,
                "groups": [
                    [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
                    for group in optimizer.param_groups
                ],
            }
            for optimizer in optimizers
        ],
        "lr_schedulers": [_scheduler(each.scheduler, optimizers if len(optimizers) > 1 else ()) for each in configs],
    }


def _scheduler(scheduler: Any, optimizers: Sequence[Any] = ()) -> str:
    """``SequentialLR(LinearLR, StepLR) of optimizer 1``: the class, those inside, and whose learning rate it sets."""
    name = type(scheduler).__qualname__
    inside = getattr(scheduler, "_schedulers", ())
    if isinstance(inside, list | tuple) and inside:
        name += f"({', '.join(map(_scheduler, inside))})"
    numbers = [number for number, each in enumerate(optimizers) if each is getattr(scheduler, "optimizer", None)]
    return f"{name} of optimizer {numbers[0]}" if numbers else name


def _same_schedulers(before: Sequence[str], here: Sequence[str]) -> bool:
    """Return whether the schedulers are the same; the first checkpoints held only the outer class."""
    return len(before) == len(here) and all(
        old == new or old == re.split(r"\(| of optimizer ", new)[0] for old, new in zip(before, here, strict=True)
    )


def check_same(
    saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, path: str, *, by_hand: bool = False
) -> None:
    """Raise CheckpointMismatchError where a state would be loaded into another optimizer, group or scheduler.

    Args:
        saved: what :func:`describe` gave in the run that wrote ``path``; None if the checkpoint lacks it.
        now: its result in this run.
        path: the checkpoint, for the message.
        by_hand: whether a Run's setup gave them, and not ``configure_optimizers``.
    """
    if saved is None or now is None:
        return
    owner = "the loop" if by_hand else "configure_optimizers"
    classes = [each["class"] for each in saved["optimizers"]], [each["class"] for each in now["optimizers"]]
    schedulers = saved["lr_schedulers"], now["lr_schedulers"]
    for what, (before, here), same in (
        ("optimizer", classes, classes[0] == classes[1]),
        ("lr_scheduler", schedulers, _same_schedulers(*schedulers)),
    ):
        if not same:
            raise CheckpointMismatchError(
                f"{path!r} (field 'trained_by') holds the state of the {what}(s) {_listed(before)}, but "
                f"{'setup got' if by_hand else 'configure_optimizers returned'} {_listed(here)}: "
                f"{'give' if by_hand else 'return'} those again, in that order, or load the weights alone into the "
                f"model{'' if by_hand else ' (load_from_checkpoint)'} and {'set up' if by_hand else 'fit'} without "
                "ckpt_path"
            )
    for number, (before, here) in enumerate(zip(saved["optimizers"], now["optimizers"], strict=True)):
        for index, (old, new) in enumerate(zip(before["groups"], here["groups"], strict=False)):
            common = set(old) & set(new)
            if [name for name in old if name in common] != [name for name in new if name in common]:
                raise CheckpointMismatchError(
                    f"{path!r} (field 'trained_by') holds the state of the parameters {_listed(old[:4])}, ... in group "
                    f"{index} of optimizer {number}, but {owner} gives them in the order "
                    f"{_listed(new[:4])}, ...: a state goes by its place. Keep the order; a set has none"
                )
    places = _places(saved)
    for name, place in _places(now).items():
        if places.get(name, place) != place:
            (optimizer, group), (other, other_group) = place, places[name]
            raise CheckpointMismatchError(
                f"{path!r} (field 'trained_by') holds the state of parameter {name!r} in group {other_group} of "
                f"optimizer {other}, but {owner} puts it into group {group} of optimizer {optimizer}: "
                "keep the groups, and their order, as they were"
            )


def _places(description: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    return {
        name: (number, index)
        for number, optimizer in enumerate(description["optimizers"])
        for index, group in enumerate(optimizer["groups"])
        for name in group
    }


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
