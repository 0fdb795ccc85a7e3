"""The loss of a whole batch, of whose outputs a pipeline has one microbatch at a time.

A schedule computes the loss of each microbatch, and trains on their mean. That is the loss of the batch only if it is a
mean over samples. Where all forwards come before the first backward (:class:`WholeBatch`), the step runs once for the
batch, and any loss is correct. Where they alternate, :func:`unlike_mean` compares the two for each two microbatches
that follow each other, as such a schedule has no memory for the outputs of a whole batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from torchhal.errors import ModelError
from torchhal.pytree import map_tensors
from torchhal_parallel._dtensor_layout import is_below_float32
from torchhal_parallel._scatter_gather import merge

NO_MEAN = "the loss is no mean over samples, as one over unpadded tokens, or of samples with each other, is none"

_STRUCTURE = ("_parameters", "_modules", "forward")
"""What a module consists of, which a step does not change."""


class _GradientOf(torch.autograd.Function):
    """A number whose backward gives each of the tensors that it was made of the gradient that its leaf has by then."""

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.leaves = leaves
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *(leaf.grad for leaf in ctx.leaves)


_DETACHES = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


class Branches(TorchFunctionMode):
    """Records the branches that code takes on the truth value of comparisons of differentiable values.

    Of ``loss > 1``, also of ``torch.isfinite(loss.detach()).all()``; not of the number ``loss.item()``, which any other
    code could be given, nor of indices such as an ``argmax``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bool] = []
        self._made: dict[int, torch.Tensor] = {}
        """By ``id``, what was compared or detached of differentiable values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
        if not any(each.requires_grad or id(each) in self._made for each in given):
            return result
        if func is torch.Tensor.__bool__ or (func is torch.Tensor.item and isinstance(result, bool)):
            self.taken.append(result)
        elif isinstance(result, torch.Tensor) and (result.dtype is torch.bool or func in _DETACHES):
            self._made[id(result)] = result
        return result


class WholeBatch:
    """The loss function of a schedule whose backwards begin when all forwards are done.

    The call for the last microbatch computes the loss of all of them, and its gradient, which the backward of each
    microbatch then begins with.

    Args:
        loss: the loss for what the model gives for the batch; runs the user's step.
        sizes: samples of each microbatch.
    """

    def __init__(self, loss: Callable[[Any], torch.Tensor], sizes: Sequence[int], device: torch.device) -> None:
        self.loss = loss
        self.sizes = sizes
        self.device = device
        self.outputs: list[Any] = []
        self.leaves: list[torch.Tensor] = []

    def __call__(self, output: Any) -> torch.Tensor:
        """Return what the schedule calls backward on for this microbatch."""
        tensors: list[torch.Tensor] = []
        leaves: list[torch.Tensor] = []

        def leaf_of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            tensors.append(value)
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        self.outputs.append(map_tensors(output, leaf_of))
        self.leaves += leaves
        made: Any = _GradientOf.apply(leaves, *tensors) if tensors else None  # type: ignore[no-untyped-call]
        if len(self.outputs) == len(self.sizes):
            try:
                loss = self.loss(merge(self.outputs, self.sizes, self.device))
            except ModelError:  # which the pipeline raises when the backwards are done: they begin with something
                for leaf in self.leaves:
                    leaf.grad = torch.zeros_like(leaf)
                raise
            finally:
                self.outputs, self.leaves = [], []
            loss.backward()  # type: ignore[no-untyped-call]
        return torch.zeros((), device=self.device) if made is None else made


def unlike_mean(
    model: str, losses: Sequence[torch.Tensor], whole: torch.Tensor, *, microbatches: int, narrow: bool
) -> str | None:
    """Return an error text if the loss of some microbatches together is not the mean of ``losses``, theirs.

    Args:
        model: its name.
        losses: those of some of the ``microbatches`` of a batch.
        whole: that of these together.
        microbatches: see above.
        narrow: something was computed in 16 bits.
    """
    numbers = other_mean(losses, [1] * len(losses), whole, narrow=narrow)
    if numbers is None:
        return None
    return (
        f"the training_step of {model} gives for {len(losses)} of the {microbatches} microbatches of a batch together "
        f"the loss {numbers[0]:.6g}, and for each alone losses whose mean is {numbers[1]:.6g}, on which this pipeline "
        f"would train: {NO_MEAN}. Set HybridStrategy(pipeline=..., schedule='gpipe'), which computes the loss of the "
        "whole batch. Or divide a sum over tokens by the samples times the mean number of tokens per sample of the "
        "whole batch, a tensor without dimension that collate_fn adds to the batch"
    )


def other_mean(
    losses: Sequence[torch.Tensor], sizes: Sequence[int], whole: torch.Tensor, *, narrow: bool
) -> tuple[float, float] | None:
    """Return (``whole``, the mean of ``losses`` weighed by ``sizes``) if they differ by more than rounding."""
    parts, expected = [float(loss) for loss in losses], float(whole)
    mean = sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
    if not math.isfinite(expected):
        return None
    tolerance = 2e-2 if whole.element_size() < 4 else 5e-3 if narrow else 1e-4
    if math.isfinite(mean) and abs(mean - expected) <= tolerance * max(abs(expected), *map(abs, parts)) + 1e-7:
        return None
    return expected, mean


@contextmanager
def without_traces(module: nn.Module, kept: Sequence[Any]) -> Iterator[None]:
    """Inside, what a step changes of the module's attributes and buffers are copies, which are gone afterwards.

    What can't be copied stays as it is; ``kept`` are objects that attributes may refer to and that are not copied.
    """
    memo = {id(item): item for item in (*module.modules(), *module.parameters(), *kept)}
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for owner in module.modules():
        members = vars(owner)
        before.append((members, dict(members)))
        for name, value in list(members.items()):
            if name in _STRUCTURE or "hook" in name or isinstance(value, DataLoader | Dataset):
                continue
            if name.startswith("__composable_api_state_key"):  # what fully_shard keeps: shards of all parameters
                continue
            try:
                members[name] = copy.deepcopy(value, memo)
            except Exception:
                continue
    try:
        yield
    finally:
        for members, own in before:
            members.clear()
            members.update(own)


def is_narrow(device: torch.device, outputs: Any) -> bool:
    """Return whether a loss of ``outputs`` may be computed in 16 bits."""
    found = torch.is_autocast_enabled(device.type)

    def look(value: Any) -> Any:
        nonlocal found
        found = found or (isinstance(value, torch.Tensor) and is_below_float32(value))
        return value

    map_tensors(outputs, look)
    return found


def leaf_of(value: Any) -> Any:
    """Return ``value``, as a leaf of a graph of its own if it can have a gradient."""
    floating = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.requires_grad_() if floating else value


def detached(value: Any) -> Any:
    """Return a nest of tensors without their graphs."""
    return map_tensors(value, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
