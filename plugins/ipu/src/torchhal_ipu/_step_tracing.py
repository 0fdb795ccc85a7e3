"""Make a step a module that poptorch compiles: tensors in, tensors out, the loss inside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from typing import Any, Final

import torch
from torch import nn

from torchhal.errors import ModelError
from torchhal.pytree import map_tensors

TENSOR: Final = "<tensor>"
"""Where a tensor stands in the structure of a batch."""


class TracedIndex:
    """A stand-in for ``batch_idx`` within a compiled step, which raises whatever is done with it."""

    _name: str
    _step: str

    def __init__(self, name: str, step: str) -> None:
        self.__dict__.update(_name=name, _step=step)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            f"{self._step} uses {self._name}, which a compiled step doesn't know: its Python code runs once, and the "
            f"graph for every batch. Use {self._name} in the hooks on_train_batch_start, on_validation_batch_start, "
            "..., which run for each"
        )


for _operator in (
    "__abs__", "__add__", "__and__", "__bool__", "__eq__", "__float__", "__floordiv__", "__format__", "__ge__",
    "__gt__", "__hash__", "__index__", "__int__", "__le__", "__lt__", "__mod__", "__mul__", "__ne__", "__neg__",
    "__radd__", "__rfloordiv__", "__rmod__", "__rmul__", "__rsub__", "__rtruediv__", "__str__", "__sub__",
    "__truediv__", "__getattr__",
):  # fmt: skip
    setattr(TracedIndex, _operator, TracedIndex._refuse)


class Logged:
    """One call of ``self.log`` in a compiled step: all of it but the value, which each run brings anew.

    Args:
        name: what is logged.
        arguments: the others of ``Results.log``, by their names.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self.name = name
        self._arguments = dict(arguments)

    def arguments(self, parts: int) -> dict[str, Any]:
        """Return the arguments beside name and value, for a call of so many micro-batches.

        A batch size is of them all.
        """
        size = self._arguments["batch_size"]
        return {**self._arguments, "batch_size": size * parts} if isinstance(size, int) else self._arguments

    @property
    def reduction(self) -> str:
        given = self._arguments["reduce_fx"]
        return given if isinstance(given, str) else getattr(given, "__name__", "mean")


class Record:
    """The outputs and logs of a step when it was recorded."""

    def __init__(self) -> None:
        self.output: Any = None
        """What it returned, with the dtype and the number of dimensions of each tensor in its place."""
        self.outputs = 0
        """How many tensors that are."""
        self.logged: list[Logged] = []


@contextmanager
def _captured(results: Any, step: str, logged: list[Logged], values: list[torch.Tensor]) -> Iterator[None]:
    """Collect what is logged inside in these lists."""
    if results is None:
        yield
        return

    signature = inspect.signature(results.log)

    def log(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        name, value = given.pop("name"), given.pop("value")
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ModelError(
                f"self.log({name!r}, ...) in {step} got {_said(value)}: a compiled step logs tensors of one element, "
                "which it computes anew for each batch. Log anything else in on_train_batch_end, "
                "on_validation_batch_end, ..., from what the step returns"
            )
        logged.append(Logged(name, given))
        values.append(value.detach().reshape(()))

    vars(results)["log"] = log
    try:
        yield
    finally:
        del vars(results)["log"]


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Number):
        return f"{value!r}, which would be that number for ever"
    return f"an object of class {type(value).__name__}"


class Step(nn.Module):
    """A step of the user's as a module for poptorch.

    Args:
        module: the user's.
        step: its step, with the precision around it; called as ``step(batch, *indices)``.
        name: of the step.
        structure: of a batch, :data:`TENSOR` for its tensors.
        indices: for the arguments after the batch.
        results: what ``self.log`` writes to; None without a Trainer.
        training: whether the step ends in a loss.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Callable[..., Any],
        name: str,
        structure: Any,
        indices: tuple[Any, ...],
        results: Any,
        *,
        training: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self.record = Record()  # shared by the copies that poptorch makes of this module
        self._step = step
        self._name = name
        self._structure = structure
        self._indices = indices
        self._results = results
        self._trains = training

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        batch = map_tensors(self._structure, lambda leaf: next(given) if leaf is TENSOR else leaf)
        name = f"{type(self.module).__name__}.{self._name}"
        logged: list[Logged] = []
        values: list[torch.Tensor] = []
        with _captured(self._results, name, logged, values):
            output = self._step(batch, *self._indices)
        if self._trains:
            output = _with_loss(output, name)
        returned: list[torch.Tensor] = []

        def describe(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                if isinstance(leaf, Number) or getattr(leaf, "ndim", 0) != 0:
                    raise ModelError(
                        f"{name} returns {_said(leaf)}: a compiled step returns tensors, which it computes anew for "
                        "each micro-batch. Take anything else from the batch, in on_train_batch_end, "
                        "on_validation_batch_end, ..."
                    )
                return leaf
            returned.append(leaf)
            return Returned(leaf.dtype, leaf.dim())

        self.record.output = map_tensors(output, describe)
        self.record.outputs = len(returned)
        self.record.logged = logged
        return tuple(returned + values)


class Returned:
    """A tensor that a step returns for each micro-batch."""

    def __init__(self, dtype: torch.dtype, dim: int) -> None:
        self.dtype = dtype
        self.dim = dim

    def of_call(self, value: torch.Tensor) -> torch.Tensor:
        """Return what a call returns for all micro-batches together: joined by the first dimension.

        Of numbers it is the mean of floats, and each of whole numbers and truth values, whose sum, greatest or any may
        be meant.
        """
        if self.dim or not value.dim():
            return value.to(self.dtype)
        return value.float().mean().to(self.dtype) if self.dtype.is_floating_point else value.to(self.dtype)


def _with_loss(output: Any, name: str) -> Any:
    """Return ``output`` with its loss marked as poptorch needs it."""
    import poptorch

    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        hint = " (None would skip a batch, and a compiled step can't)" if loss is None else ""
        raise ModelError(f"{name} must return a tensor, or a dict with 'loss' (got {output!r}){hint}")
    if loss.numel() != 1:
        raise ModelError(
            f"{name} must return one number to minimise (got a tensor of shape {tuple(loss.shape)}): take its mean"
        )
    marked = poptorch.identity_loss(loss, reduction="mean")
    return map_tensors(output, lambda leaf: marked if leaf is loss else leaf)
