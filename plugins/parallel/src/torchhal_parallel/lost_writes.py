"""Find, in the first training step, what a forward writes to sharded parameters.

What it writes to gathered ones is lost when they are freed, and what it writes to the parts differs from rank to rank
where it depends on the batch.
"""

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
        self.steps_inside = not getattr(module, "automatic_optimization", True)
        """Whether optimizers step inside the step, and so write to parameters themselves."""
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.sharded: dict[tuple[int, str], Any] = {
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
                before = self._sums()
                output = step(*args, **kwargs)
                self._check_parts(before)
                return output

        return call

    def _sums(self) -> list[int]:
        """The bits of each part added up, which nearly every write changes, one through ``.data`` too."""
        if self.steps_inside:
            return []
        parts = [local(parameter.detach()) for parameter in self.sharded.values()]
        sums = [part.contiguous().view(torch.uint8).sum(dtype=torch.int64) for part in parts]
        return torch.stack(sums).tolist() if sums else []

    def _check_parts(self, before: list[int]) -> None:
        for parameter, now, then in zip(self.sharded.values(), self._sums(), before, strict=False):
            if now != then:
                raise ModelError(
                    f"a forward of {self.model} writes to {self.names.get(id(parameter), 'a parameter')!r} while "
                    f"strategy {self.alias!r} has it in parts: by what is in its own batch, each rank would change its "
                    "part otherwise. Write to parameters between the steps, in on_train_batch_start say, or use "
                    "strategy='single_device'"
                )

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
