"""Find the input and output shapes of a model's layers by a forward of a copy that has no memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from torchhal import rng
from torchhal.accelerators import Accelerator
from torchhal.pytree import map_tensors
from torchhal.trainer.callbacks._meta_copy import copy_for_forward


def layer_shapes(
    module: nn.Module, names: list[str], accelerator: Accelerator, device: torch.device
) -> dict[str, tuple[str, str]]:
    """Return the shapes of the first call of each layer, as text, by its name; none for a layer that isn't called.

    ``forward`` is called with ``module.example_input_array``: a tensor, a tuple of arguments, or a dict of keywords. It
    runs in evaluation mode and without gradients on a copy of ``module`` on the meta device, which computes nothing: a
    forward that depends on values raises. Random states are restored.

    Args:
        module: the whole model.
        names: of its layers.
        accelerator: of ``device``.
        device: the one whose random state is restored too.

    Raises:
        Exception: what the forward raises.
    """
    found: dict[str, tuple[str, str]] = {}

    def record(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = (*args, *kwargs.values())
        found.setdefault(name, (shape_of(given[0] if len(given) == 1 else given), shape_of(output)))

    twin = copy_for_forward(module)
    arguments, keywords = _example(module)
    state = rng.collect(accelerator, device)
    try:
        with torch.no_grad(), torch.device("meta"), _eager():
            for name in names:
                twin.get_submodule(name).register_forward_hook(partial(record, name), with_kwargs=True)
            twin(*arguments, **keywords)
    finally:
        rng.restore(state, accelerator, device)
    return found


def shape_of(value: Any) -> str:
    """Return the shape of a tensor, or those of a container, such as ``"[[2, 3], [2]]"``; ``"?"`` of anything else."""
    if hasattr(value, "shape"):
        return f"[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shape_of, value))}]"
    return "?"


def _example(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and keywords, on the meta device."""
    given: Any = map_tensors(
        module.example_input_array, lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf
    )
    if isinstance(given, Mapping):
        return (), {str(name): value for name, value in given.items()}
    return (given if isinstance(given, tuple) else (given,)), {}


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled, which would take longer than the fit's first steps."""
    # only what has imported torch._dynamo, which takes seconds, has something to compile
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
