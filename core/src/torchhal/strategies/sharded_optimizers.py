"""Check that optimizers can step on some of a model's parameters alone, and let them do so.

For strategies whose ranks step each a share of the parameters, or of the elements, as ZeRO does.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.strategies._optimizer_settings import find_differing_settings
from torchhal.strategies._optimizer_trials import STEP_HOOKS, OptimizerTrial, OptimizerTrials, check_separable

__all__ = [
    "OptimizerTrial",
    "OptimizerTrials",
    "check_separable",
    "deferred_step_hooks",
    "find_differing_settings",
    "with_parameters",
]

_POST_HOOKS = "_optimizer_step_post_hooks"


@contextmanager
def with_parameters(optimizer: Optimizer, parameters: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    """Give ``optimizer`` these parameters in its groups; the hooks of its step see all, as code elsewhere does."""
    everything = [group["params"] for group in optimizer.param_groups]
    hooks = {name: (found, set(found)) for name in STEP_HOOKS if (found := getattr(optimizer, name, None))}

    def seeing_all(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with _groups_of(optimizer, everything):
                return hook(*args)

        return call

    for name, (own, _) in hooks.items():
        setattr(optimizer, name, OrderedDict((number, seeing_all(hook)) for number, hook in own.items()))
    try:
        with _groups_of(optimizer, parameters):
            yield
    finally:
        for name, (own, before) in hooks.items():  # of which some may be gone, and others new
            own.update((number, hook) for number, hook in getattr(optimizer, name).items() if number not in before)
            setattr(optimizer, name, own)


@contextmanager
def deferred_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Run the post hooks of the optimizer's steps inside this context when it is left, not in the step.

    Around a step and what sends the updated parameters to the other ranks: hooks see, and may change, whole and equal
    weights. Where the context is left by an error they don't run. Hooks of all optimizers
    (``register_optimizer_step_post_hook``) run in the step.

    .. versionadded:: 0.2
    """
    hooks: OrderedDict[int, Callable[..., Any]] | None = getattr(optimizer, _POST_HOOKS, None)
    if not hooks:
        yield
        return
    calls: list[tuple[Any, ...]] = []
    setattr(optimizer, _POST_HOOKS, OrderedDict({-1: lambda _, *given: calls.append(given)}))
    try:
        yield
    finally:
        hooks.update((number, hook) for number, hook in getattr(optimizer, _POST_HOOKS).items() if number >= 0)
        setattr(optimizer, _POST_HOOKS, hooks)
    for given in calls:
        for hook in list(hooks.values()):
            hook(optimizer, *given)


@contextmanager
def _groups_of(optimizer: Optimizer, parameters: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    before = [group["params"] for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, parameters, strict=True):
        group["params"] = own
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=False):  # a hook may have added a group
            group["params"] = own
