"""Find, in the first training step, what a forward writes to gathered parameters: it is lost when they are freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchhal.errors import ModelError
from torchhal_parallel.layout import like, local


class LostWrites:
    """Compares what each rank has of the parameters of ``units`` with what they were gathered to, after a forward.

    Made while the units are sharded.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], alias: str) -> None:
        self.model = type(module).__name__
        self.units = units
        self.alias = alias
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.sharded = {
            (id(owner), attribute): parameter
            for unit in units
            for owner in unit.modules()
            for attribute, parameter in owner._parameters.items()
            if isinstance(parameter, DTensor)
        }

    def watched_once(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, whose first call raises ModelError if it writes to a parameter while that is gathered."""
        called = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            if called:
                return step(*args, **kwargs)
            called = True
            with ExitStack() as stack:
                for unit in self.units:  # before the unit's own hook, which frees what was gathered
                    stack.callback(unit.register_forward_hook(self._check, prepend=True).remove)
                return step(*args, **kwargs)

        return call

    def _check(self, unit: nn.Module, args: Any, output: Any) -> None:
        for owner in unit.modules():
            for attribute, now in owner._parameters.items():
                before = self.sharded.get((id(owner), attribute))
                if before is None or now is None or isinstance(now, DTensor):
                    continue  # nobody has gathered it
                part = local(like(now.detach(), before.detach()))
                if not _equal(part, local(before.detach()).to(part)):
                    raise ModelError(
                        f"a forward of {self.model} writes to {self.names.get(id(before), attribute)!r}, and strategy "
                        f"{self.alias!r} would lose that: ranks gather a parameter for a forward, and free it after. "
                        "Write to parameters between the steps, in on_train_batch_start say, or use strategy='ddp'"
                    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or (
        torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    )
