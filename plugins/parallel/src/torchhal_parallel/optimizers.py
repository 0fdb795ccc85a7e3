"""Which optimizers can't work on parameters of which each rank has other ones, or other parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from torchhal.errors import ConfigurationError
from torchhal.precision.base import needs_closure


def check_divisible(optimizer: Optimizer, alias: str) -> None:
    """Refuse an optimizer whose step takes a closure only, as one does that looks at all parameters together."""
    if needs_closure(optimizer):
        raise ConfigurationError(
            f"strategy {alias!r} divides the optimizer among the ranks, and {type(optimizer).__name__}, whose step "
            "needs a closure, looks at all parameters together: use strategy='ddp', or another optimizer"
        )


def one_by_one(optimizers: Sequence[Optimizer], what: str) -> None:
    """Let the optimizers take their parameters one by one, as torch's fast ways can't mix sharded and whole ones.

    Raises:
        ConfigurationError: an optimizer was told otherwise.
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
