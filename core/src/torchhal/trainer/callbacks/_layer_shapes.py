"""Find the input and output shapes of a model's layers by a forward that leaves the model as it was."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from torchhal import rng
from torchhal.accelerators import Accelerator
from torchhal.pytree import map_tensors

_DICTS = (dict, OrderedDict, defaultdict)
"""Classes of attributes whose items are restored too; any other is the same object afterwards."""


def layer_shapes(
    module: nn.Module, names: list[str], accelerator: Accelerator, device: torch.device
) -> dict[str, tuple[str, str]]:
    """Return the shapes of the first call of each layer, as text, by its name; none for a layer that isn't called.

    ``module.forward`` is called with ``module.example_input_array``: a tensor, a tuple of arguments, or a dict of
    keywords. It runs in evaluation mode and without gradients; attributes, buffers and random states are restored.

    Args:
        module: the whole model.
        names: of its layers.
        accelerator: of ``device``.
        device: the one whose random state is restored too.

    Raises:
        Exception: what the forward raises.
    """
    arguments, keywords = _example(module)
    found: dict[str, tuple[str, str]] = {}

    def record(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = (*args, *kwargs.values())
        found.setdefault(name, (shape_of(given[0] if len(given) == 1 else given), shape_of(output)))

    state = rng.collect(accelerator, device)
    try:
        with _restored(module), torch.no_grad(), _eager():
            for name in names:
                module.get_submodule(name).register_forward_hook(partial(record, name), with_kwargs=True)
            module(*arguments, **keywords)
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
    """Return the arguments and keywords, on the device of the first parameter."""
    given: Any = module.example_input_array
    first = next(module.parameters(), None)
    if first is not None:
        given = map_tensors(given, lambda leaf: leaf.to(first.device) if isinstance(leaf, torch.Tensor) else leaf)
    if isinstance(given, Mapping):
        return (), {str(name): value for name, value in given.items()}
    return (given if isinstance(given, tuple) else (given,)), {}


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled, which would take longer than the fit's first steps."""
    # only what has imported torch._dynamo, which takes seconds, has something to compile
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Put all parts of ``module`` into evaluation mode inside; restore their attributes and buffers afterwards."""
    parts = list(module.modules())
    before = [dict(vars(part)) for part in parts]
    # hooks and buffers among them
    dicts = [(value, dict(value)) for part in parts for value in vars(part).values() if type(value) in _DICTS]
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers() if not buffer.is_inference()]
    for part in parts:
        vars(part)["training"] = False
    try:
        yield
    finally:
        for part, attributes in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(attributes)
        for changed, items in dicts:
            changed.clear()
            changed.update(items)
        with torch.no_grad():
            for buffer, version, values in buffers:
                if buffer._version != version:  # written to in place
                    buffer.copy_(values)
