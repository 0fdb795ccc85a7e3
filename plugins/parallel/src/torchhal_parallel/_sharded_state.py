"""Load module and optimizer state into sharded tensors: each rank takes its own part of what a checkpoint holds."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.distributed import collectives
from torchhal.errors import CheckpointMismatchError
from torchhal_parallel._dtensor_layout import shard_like, to_local
from torchhal_parallel.checkpoint._lazy_tensor import StoredTensor


def place_like(name: str, value: Any, target: Any) -> Any:
    """Return ``value``, or what is in it, in the layout of ``target``, if it has its shape; anything else whole."""
    if isinstance(value, dict):
        return {key: place_like(name, each, target) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(place_like(name, each, target) for each in value)
    if not isinstance(value, torch.Tensor | StoredTensor):
        return value
    fits = isinstance(target, torch.Tensor) and tuple(value.shape) == tuple(target.shape)
    if isinstance(value, StoredTensor):
        return value.read(target if fits else None)
    if fits:
        return shard_like(value, target)
    if isinstance(target, torch.Tensor) and target is not to_local(target) and not _fits_beside(value.shape, target):
        raise CheckpointMismatchError(
            f"{name} has the shape {tuple(value.shape)} in the checkpoint and {tuple(target.shape)} here"
        )
    return value


def place_module_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """Return ``state`` in the layout of ``own``, the module's state, with the versions of its modules."""
    parts: Any = OrderedDict((name, place_like(name, value, own.get(name))) for name, value in state.items())
    if hasattr(state, "_metadata"):  # the versions of its modules, some of which bring older states up to date
        parts._metadata = state._metadata
    return parts


def broadcast_buffers(module: nn.Module, state: Mapping[str, Any], source: int, group: Any) -> dict[str, torch.Tensor]:
    """Return copies of the buffers that ``state`` has, as the rank ``source`` of ``group`` has them."""
    names = [name for name, _ in module.named_buffers(remove_duplicate=False) if name in state]
    return collectives.broadcast_copies({name: state[name] for name in sorted(names)}, src=source, group=group)


def sort_by_name(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return ``state`` in the order of ``names``, with entries of other names at the end."""
    order = {name: position for position, name in enumerate(names)}
    return dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))


def with_versions(state: Mapping[str, Any], source: Any) -> dict[str, Any]:
    """Return ``state`` with each module's version that ``source`` has, by which the module reads the state."""
    versioned: Any = OrderedDict(state)
    versioned._metadata = getattr(source, "_metadata", {})
    return versioned  # type: ignore[no-any-return]


def place_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the tensors of each parameter in the layout of that parameter."""
    placed = {
        index: {key: place_like(f"{key!r} of parameter {index}", item, target) for key, item in entry.items()}
        for index, target, entry in _by_parameter(optimizer, state)
    }
    return {**state, "state": placed}


def check_state_shapes(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatchError for state of a divided parameter that can't be divided as the parameter is."""
    for index, target, entry in _by_parameter(optimizer, state):
        for key, shape in ((key, shape) for key, item in entry.items() for shape in _shapes_in(item)):
            if target is not None and target is not to_local(target) and not _fits_beside(shape, target):
                raise CheckpointMismatchError(
                    f"the state of {type(optimizer).__name__} can't be divided as its parameters are: {key!r} of "
                    f"parameter {index} has the shape {tuple(shape)}, and the parameter {tuple(target.shape)}. "
                    "Continue with strategy='zero1' or 'ddp', under which parameters are whole"
                )


def _shapes_in(item: Any) -> Iterator[Any]:
    """Yield the shapes of the tensors in an optimizer's state, of which lists and dicts may hold several."""
    if isinstance(item, dict | list | tuple):
        for each in item.values() if isinstance(item, dict) else item:
            yield from _shapes_in(each)
    elif isinstance(item, torch.Tensor | StoredTensor):
        yield item.shape


def _fits_beside(shape: Any, target: torch.Tensor) -> bool:
    """Return whether state of ``shape`` can stand beside the divided ``target``: in its layout, or whole on every rank.

    A number of one element stays whole. One of several may have been divided, in a layout that is not recorded.
    """
    return tuple(shape) == tuple(target.shape) or math.prod(shape) == 1


def _by_parameter(optimizer: Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Mapping[str, Any]]]:
    """Index, parameter (None for an index that has none) and state of each parameter in ``state``."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entry in state["state"].items():
        yield index, parameters[index] if isinstance(index, int) and index < len(parameters) else None, entry
