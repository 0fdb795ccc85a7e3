"""Refuse writes of a training step to sharded parameters that would be lost, or make the ranks differ.

What is written to a gathered parameter is lost when that is freed. What is written to the parts is correct where each
element is made of those in its place, as a momentum teacher's are (``teacher.mul_(m).add_(student, alpha=1 - m)``), and
of numbers that the ranks have alike. A plain tensor is a rank's own.

Costs: some 50 us a step for watching writes to parts, whose operands a function inspects. Gathered parameters are
compared with the parts, bit by bit, in steps 1, 2, 4, 8, ...; every 64 steps, and when an epoch begins, a
checkpoint is saved and the fit ends, they are checked for writes, which takes 0.1 ms for 1000 of them. At
those times, but not every 64 steps, the ranks compare the numbers that they wrote.

Hooks between the steps may write as they like, but the same numbers on each rank, to gradients too: to watch one that
the user has written costs the same 50 us.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from torchhal.errors import DistributedError, ModelError
from torchhal_parallel._dtensor_layout import part_like, to_local
from torchhal_parallel._plain_semantics import watched_writes
from torchhal_parallel._remote_tensor import written

_ASKED_EVERY = 64
"""Steps."""

_BETWEEN_STEPS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip


class LostWrites:
    """Watches the training steps of ``module``, of which ``units`` are sharded among ``size`` ranks.

    Made while the units are sharded.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], alias: str, size: int) -> None:
        self.model = type(module).__name__
        self.units = units
        self.alias = alias
        self.size = size
        self.watches_parts = size > 1 and getattr(module, "automatic_optimization", True)
        """Otherwise no rank has other values, or optimizers step inside the step, and so write to parts themselves."""
        self.numbers = 0
        """A checksum of those that this rank has written to its parts."""
        self._tensors: dict[torch.device, torch.Tensor] = {}
        """The same of numbers that are tensors, by device: reading each would synchronize with its device."""
        self._last: tuple[torch.Tensor, int] | None = None
        self._steps = 0
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._sharded: dict[tuple[int, str], Any] = {
            (id(owner), attribute): parameter
            for unit in units
            for owner in unit.modules()
            for attribute, parameter in owner._parameters.items()
            if isinstance(parameter, DTensor)
        }
        self._memory: dict[int, DTensor] = {}
        self._gathered: dict[int, tuple[torch.Tensor, int, str]] = {}
        """What was gathered, always into the same tensor, with how often it was written to before, and its name."""

    def watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step``, a call of which raises ModelError for a write that would be lost."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            self._remember()
            with ExitStack() as stack:
                if compared := not self._steps & (self._steps - 1):
                    compare = _untraced(self._compare)
                    for unit in self.units:  # before the unit's own hook, which frees what was gathered
                        stack.callback(unit.register_forward_hook(compare, prepend=True).remove)
                if self.watches_parts:
                    stack.enter_context(watched_writes(self._check_write))
                output = step(*args, **kwargs)
            if compared or not self._steps % _ASKED_EVERY:
                self.check_gathered()
            return output

        return call

    def _remember(self) -> None:
        if not self._memory:
            self._memory = {_memory(parameter): parameter for parameter in self._sharded.values()}

    def around_hook(self, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``body`` of a hook, whose numbers are recorded if it is the user's and may write between the steps."""
        of_torchhal = str(getattr(body, "__module__", "")).partition(".")[0] == "torchhal"
        if self.size == 1 or name not in _BETWEEN_STEPS or of_torchhal:
            return body

        def call(*args: Any) -> Any:
            self._remember()
            gradients: dict[int, Any] = {}

            def check(operator: Any, args: Any, kwargs: Any) -> None:
                if not gradients:
                    found = (parameter.grad for parameter in self._sharded.values())
                    gradients.update((_memory(each), each) for each in found if isinstance(each, DTensor))
                self._note(operator, args, kwargs, gradients)

            with watched_writes(check):
                return body(*args)

        call.__self__ = getattr(body, "__self__", None)  # type: ignore[attr-defined]
        return call

    def _note(self, operator: Any, args: Any, kwargs: Any, gradients: dict[int, Any]) -> None:
        targets = {_memory(tensor) for tensor in written(operator, args, kwargs) if isinstance(tensor, DTensor)}
        if not any(memory in self._memory or memory in gradients for memory in targets):
            return
        leaves = tree_leaves((args, kwargs))
        numbers = [leaf for leaf in leaves if isinstance(leaf, int | float | complex)]
        self.numbers = zlib.crc32(repr((operator.name(), numbers)).encode(), self.numbers)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.numel() == 1:
                self._add(leaf.detach())

    def _add(self, number: torch.Tensor) -> None:
        if (
            self._last is not None
            and number.data_ptr() == self._last[0].data_ptr()
            and number._version == self._last[1]
        ):
            return  # one number for all parameters
        self._last = number, number._version
        total = self._tensors.get(number.device)
        value = number.reshape(()).float()
        self._tensors[number.device] = value if total is None else total * 0.75 + value

    def checksum(self) -> tuple[int, list[str]]:
        """Return a checksum that is the same on ranks that have written the same numbers."""
        return self.numbers, [repr(total.item()) for total in self._tensors.values()]

    def check_gathered(self) -> None:
        """Raise ModelError if a gathered parameter was written to, other than through ``.data``, since the first step.

        torch counts what is written to a tensor, and gathers without counting.
        """
        for tensor, count, name in self._gathered.values():
            if tensor._version != count:
                raise self._lost(name)

    def _compare(self, unit: nn.Module, args: Any, output: Any) -> None:
        for owner in unit.modules():
            for attribute, now in owner._parameters.items():
                before = self._sharded.get((id(owner), attribute))
                if before is None or now is None or isinstance(now, DTensor):
                    continue  # not gathered
                name = self._names.get(id(before), attribute)
                own = to_local(before.detach())
                part = part_like(now.detach(), before)  # a copy would be the most that a step has on the device
                if not _equal(part.to(own.device), own.to(part.dtype)):
                    raise self._lost(name)
                self._gathered.setdefault(id(now), (now, now._version, name))

    def _lost(self, name: str) -> ModelError:
        return ModelError(
            f"a training step of {self.model} writes to {name!r}, and strategy {self.alias!r} would lose that: ranks "
            "gather a parameter for a forward, and free it after. Write to parameters between the steps, in "
            "on_train_batch_end say, or use strategy='ddp'"
        )

    def _check_write(self, operator: Any, args: Any, kwargs: Any) -> None:
        targets = [tensor for tensor in written(operator, args, kwargs) if isinstance(tensor, DTensor)]
        found = [parameter for tensor in targets if (parameter := self._memory.get(_memory(tensor))) is not None]
        if not found:
            return
        leaves = tree_leaves((args, kwargs))
        name = self._names.get(id(found[0]), "a parameter")
        if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) for leaf in leaves):
            raise ModelError(
                f"a training step of {self.model} writes a plain tensor to {name!r} ({operator.name()}) while strategy "
                f"{self.alias!r} has it in parts: each rank has a tensor of its own, by its own batch say, and would "
                "change its part otherwise. Write what is made of other parameters in parts and of numbers that are "
                "the same on each rank (float(tensor)), or between the steps, in on_train_batch_end say, or use "
                "strategy='ddp'"
            )
        numbers = [leaf for leaf in leaves if isinstance(leaf, int | float | complex)]
        self.numbers = zlib.crc32(repr((name, operator.name(), numbers)).encode(), self.numbers)

    def parted(self) -> DistributedError:
        """Return the error for ranks on which :attr:`numbers` are not the same."""
        return DistributedError(
            f"the training steps of {self.model}, or hooks between them, wrote to parameters or gradients that "
            f"strategy {self.alias!r} has in parts, and the ranks did not write the same numbers, by their own batches "
            "say: their parts don't belong together. Write the same on each rank, such as what "
            "trainer.strategy.reduce(value) gives, or use strategy='ddp'"
        )


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as torch.compile leaves it alone; without torch._dynamo, slow to import, unchanged."""
    if "torch._dynamo" not in sys.modules:
        return function
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def _memory(tensor: DTensor) -> int:
    return int(tensor._local_tensor.untyped_storage()._cdata)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or (
        torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    )
