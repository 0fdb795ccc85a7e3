"""Define the calls in a recorded forward: operators as they are, in a context of their own, autograd functions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


class InContext:
    """An operator that runs with gradients as in the forward, and without the casts of autocast if these are done."""

    def __init__(self, function: Any, *, with_grad: bool, autocast: str | None) -> None:
        self.function = function
        self.with_grad = with_grad
        self.autocast = autocast
        """The kind of device whose autocast is left; None for none."""
        self.__name__ = function.__name__.replace(".", "_")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leave = nullcontext() if self.autocast is None else torch.autocast(self.autocast, enabled=False)
        with torch.set_grad_enabled(self.with_grad and torch.is_grad_enabled()), leave:
            return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return str(self.function)


class FunctionCall:
    """A call of an ``autograd.Function``."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.__name__ = kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)


_SAME_AGAIN: Final = ("clamp_", "clamp_min_", "clamp_max_", "relu_", "abs_", "zero_", "fill_")


def is_same_again(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator in place may as well run for each microbatch of a batch."""
    name = func._schema.name.partition("::")[2]
    tensors = sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
    return name == "embedding_renorm_" or (name in _SAME_AGAIN and tensors == 1)


def is_mutable(node: fx.Node) -> bool:
    """Return whether a node changes a tensor in place."""
    target = node.target.function if isinstance(node.target, InContext) else node.target
    schema = getattr(target, "_schema", None)
    # a Function can't be inspected
    return isinstance(target, FunctionCall) or (schema is not None and bool(schema.is_mutable))
