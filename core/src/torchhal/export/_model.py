"""Build the module that a checkpoint is of, with the checkpoint's weights, in evaluation mode."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchhal._overrides import implements
from torchhal._saved_hyperparameters import build_from_checkpoint, raising_mismatch
from torchhal.checkpoint._inspection import memory_key
from torchhal.checkpoint._trainer_format import RUN_KEY, check_dtypes
from torchhal.errors import ConfigurationError, ModelError


def build_model(
    make: Callable[..., Any] | None,
    arguments: Mapping[str, Any] | Sequence[Any] | None,
    checkpoint: dict[str, Any],
    state: Mapping[str, Any],
    path: str,
) -> nn.Module:
    """Return what ``make`` builds with the arguments in the checkpoint and those given, with the weights ``state``.

    Its parameters and buffers have the dtypes of ``state``.

    Args:
        make: a class or function; None for the class that the checkpoint names, if that is imported.
        arguments: by name, or in order.
        checkpoint: as read; ``on_load_checkpoint`` of the module is handed it.
        state: the weights.
        path: of the checkpoint, for messages.

    Raises:
        ConfigurationError: no model is given and the checkpoint names none that is imported.
        ModelError: it returned no module, or can't be called so.
        CheckpointMismatchError: the arguments or the weights don't fit.
    """
    make = make or _class_of(checkpoint, path)
    name = getattr(make, "__name__", repr(make))
    built: Any = build_from_checkpoint(make, checkpoint, path, _by_name(make, name, arguments))
    if not isinstance(built, nn.Module):
        raise ModelError(f"{name} must be, or return, an nn.Module (got {built!r})")
    module: Any = built
    own = type(module).__name__
    if implements(module, "configure_model"):
        with raising_mismatch(lambda error: f"{own}.configure_model raised {type(error).__name__}: {error}"):
            module.configure_model()
    if implements(module, "on_load_checkpoint"):
        passed = {**checkpoint, "state_dict": dict(state)}
        with raising_mismatch(lambda error: f"{own}.on_load_checkpoint raised {type(error).__name__}: {error}"):
            module.on_load_checkpoint(passed)
        state = passed["state_dict"]
    with raising_mismatch(lambda error: f"{path!r}: the weights don't belong to {own}: {error}"):
        check_dtypes(state, module, path)
        _take_dtypes(module, state)
        module.load_state_dict(state, strict=getattr(module, "strict_loading", True))
    return built.cpu().eval()


def count_parameters(module: nn.Module | None, state: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the number of elements of all parameters, without a module of all tensors, and the dtypes of these."""
    tensors = {memory_key(value): value for value in state.values() if isinstance(value, torch.Tensor)}
    counted = list(tensors.values()) if module is None else list(module.parameters())
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in counted if tensor.is_floating_point()}
    return sum(tensor.numel() for tensor in counted), tuple(sorted(dtypes))


def _class_of(checkpoint: Mapping[str, Any], path: str) -> Callable[..., Any]:
    """Return the class that the checkpoint names. Nothing is imported for it: a file must not choose what runs."""
    facts = checkpoint.get(RUN_KEY)
    target = facts.get("model") if isinstance(facts, Mapping) else None
    if not isinstance(target, str):
        raise ConfigurationError(
            f"'model' must be given: {path!r} doesn't name the class of its model. In a program pass the class, in a "
            "shell --model package.module:Class"
        )
    module, _, names = target.partition(":")
    found: Any = sys.modules.get(module)
    for each in names.split("."):
        found = getattr(found, each, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    shell = f"--model {target}" if module != "__main__" else f"--model SCRIPT:{names}, without the .py of the script"
    raise ConfigurationError(
        f"'model' must be given: {path!r} is of {target!r}, which is not imported here, and a file isn't let import "
        f"anything. In a program import it or pass the class, in a shell add {shell}"
    )


def _by_name(
    make: Callable[..., Any], name: str, arguments: Mapping[str, Any] | Sequence[Any] | None
) -> Mapping[str, Any]:
    if arguments is None:
        return {}
    if isinstance(arguments, str) or not isinstance(arguments, Mapping | Sequence):
        raise ConfigurationError(f"'model_args' must be the model's arguments by name, or in order (got {arguments!r})")
    positions, keywords = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
    try:
        bound = inspect.signature(make).bind_partial(*positions, **keywords)
    except TypeError as error:
        takes = str(inspect.signature(make)).partition(" -> ")[0]
        raise ModelError(f"{name}{takes} can't be called with 'model_args' {arguments!r} ({error})") from error
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in bound.signature.parameters.values()):
        raise ConfigurationError(f"'model_args' must be by name for {name}, which takes any number of positions")
    given = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    return given


@torch.no_grad()
def _take_dtypes(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give floating-point parameters and buffers the dtype of their weights, into which nothing is then rounded."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        saved = getattr(state.get(name), "dtype", None)
        if isinstance(tensor, UninitializedBuffer | UninitializedParameter):  # takes the dtype with the shape
            continue
        if isinstance(saved, torch.dtype) and saved.is_floating_point and tensor.is_floating_point():
            tensor.data = tensor.data.to(saved)
