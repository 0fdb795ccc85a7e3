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

__all__ = ["OptimizerTrial", "OptimizerTrials", "check_separable", "find_differing_settings", "with_parameters"]


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
def _groups_of(optimizer: Optimizer, parameters: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    before = [group["params"] for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, parameters, strict=True):
        group["params"] = own
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=False):  # a hook may have added a group
            group["params"] = own
