"""Find the input and output shapes of a model's layers by a forward that leaves the model as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from torchhal import rng
from torchhal.accelerators import Accelerator
from torchhal.pytree import map_tensors


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
        with _restored(module), torch.no_grad():
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


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Put all parts of ``module`` into evaluation mode inside, uncompiled; restore what they and their hooks set."""
    parts = list(module.modules())
    before = [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(part).items()}
        for part in parts
    ]
    dicts = [{name: value for name, value in vars(part).items() if isinstance(value, dict)} for part in parts]
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers() if not buffer.is_inference()]
    for part in parts:
        vars(part)["training"] = False
        vars(part).pop("_compiled_call_impl", None)
    try:
        yield
    finally:
        for part, attributes, own in zip(parts, before, dicts, strict=True):
            for name, kept in own.items():  # the objects that were there, with what was in them
                kept.clear()
                kept.update(attributes[name])
            vars(part).clear()
            vars(part).update({**attributes, **own})
        with torch.no_grad():
            for buffer, version, values in buffers:
                if buffer._version != version:  # written to in place
                    buffer.copy_(values)
