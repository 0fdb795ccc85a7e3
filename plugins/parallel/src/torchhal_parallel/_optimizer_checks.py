"""Check that optimizers can step sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError
from torchhal.precision import needs_closure


def check_divisible(optimizer: Optimizer, alias: str) -> None:
    """Refuse an optimizer whose step requires a closure, as one does that depends on all parameters together."""
    if needs_closure(optimizer):
        raise ConfigurationError(
            f"strategy {alias!r} divides the optimizer among the ranks, and {type(optimizer).__name__}, whose step "
            "needs a closure, looks at all parameters together: use strategy='ddp', or another optimizer"
        )


def check_own_parameters(optimizer: Optimizer, own: Set[nn.Parameter]) -> None:
    """Raise ConfigurationError for an optimizer of parameters that are not ``own``, those of the divided model."""
    if any(parameter not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigurationError(
            f"the {type(optimizer).__name__} was made before the model was divided and would step on tensors "
            "that nobody uses: make it in configure_optimizers"
        )


def check_shardable_optimizer(optimizer: Optimizer) -> None:
    """Raise ConfigurationError for an optimizer of torch whose step can't compute with sharded parameters."""
    if isinstance(optimizer, torch.optim.Adafactor):
        raise ConfigurationError(
            "torch's Adafactor can't compute its statistics of rows and columns of sharded parameters: use "
            "strategy='zero1', which divides its state too, or another optimizer"
        )
    if isinstance(optimizer, torch.optim.Rprop):
        raise ConfigurationError(
            "torch's Rprop sets chosen elements of its gradients, which it can't where they are sharded: use "
            "strategy='zero1', which divides its state too, or another optimizer"
        )


def one_by_one(optimizers: Sequence[Optimizer], what: str) -> None:
    """Let the optimizers take their parameters one by one, as torch's fast ways can't mix sharded and whole ones.

    Raises:
        ConfigurationError: an optimizer was constructed with ``foreach`` or ``fused``.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("foreach") or group.get("fused"):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} must not have foreach=True or fused=True under {what}, where some "
                    "parameters are sharded and others whole: leave them out"
                )
            if "foreach" in group:
                group["foreach"] = False  # None lets torch choose it on some devices
