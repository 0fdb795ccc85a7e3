"""Move a batch: any nesting of containers, tensors and objects with a method ``to``."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

__all__ = [
    "map_tensors",
    "move_to_device",
    "moves_itself",
]

_log = logging.getLogger(__name__)


def map_tensors(batch: Any, function: Callable[[Any], Any], *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return ``batch`` with ``function`` applied to each leaf; containers are rebuilt as what they were.

    Mappings, lists, tuples, named tuples and dataclass instances are entered, subclasses too, unless ``is_leaf``
    is true for them; everything else, str, numbers and None included, is a leaf. A container whose leaves all come
    back unchanged is returned itself, so that an identity costs no copy and keeps the user's object. The batch and
    its containers are never written to.
    """
    if isinstance(batch, torch.Tensor) or (is_leaf is not None and is_leaf(batch)):
        return function(batch)
    if isinstance(batch, tuple | list):
        values = [map_tensors(item, function, is_leaf=is_leaf) for item in batch]
        if all(value is item for value, item in zip(values, batch, strict=True)):
            return batch
        return _rebuild_sequence(batch, values)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, function, is_leaf=is_leaf) for key, value in batch.items()}
        if all(items[key] is value for key, value in batch.items()):
            return batch
        return _rebuild_mapping(batch, items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = {}
        for entry in dataclasses.fields(batch):
            if not hasattr(batch, entry.name):  # init=False and not set yet
                continue
            value = getattr(batch, entry.name)
            new = map_tensors(value, function, is_leaf=is_leaf)
            if new is not value:
                changed[entry.name] = new
        if not changed:
            return batch
        result = copy.copy(batch)
        for name, value in changed.items():
            object.__setattr__(result, name, value)  # frozen dataclasses and init=False fields alike
        return result
    return function(batch)


def _rebuild_mapping(old: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(old) is dict:
        return items
    if isinstance(old, dict | UserDict):  # a copy keeps default factories and attributes
        new = copy.copy(old)
        for key, value in items.items():  # not update(): some refuse it
            new[key] = value
        return new
    return type(old)(items)  # type: ignore[call-arg]  # a shallow copy might share its storage with the user's


def _rebuild_sequence(old: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    if type(old) is list:
        return values
    if isinstance(old, list):
        new = copy.copy(old)
        new[:] = values
        return new
    make = getattr(old, "_make", None)  # named tuples, also with a constructor of their own
    return type(old)(values) if make is None else make(values)


def move_to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return ``batch`` with every tensor, and every object that has a method ``to``, on ``device``.

    An object with such a method moves itself, container or not: it may keep some part where it is.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if not moves_itself(leaf):
            return leaf
        try:
            moved = leaf.to(device, non_blocking=non_blocking)
        except TypeError:  # an own .to(device) without torch's keywords
            moved = leaf.to(device)
        return leaf if moved is None else moved  # moved in place

    return map_tensors(batch, move, is_leaf=moves_itself)


def moves_itself(item: Any) -> bool:
    """Return whether it has a method ``to`` of its own, as tensors and many containers of them do."""
    return callable(getattr(item, "to", None)) and not isinstance(item, type)


def move_module(module: nn.Module, device: torch.device) -> None:
    """Call ``module.to(device)``, after which each parameter is the object that it was, as on torch's own devices.

    Between the CPU and a PrivateUse1 device torch makes new parameters: tied ones come apart, an optimizer or a list
    that holds one holds the old one, and the new ones have neither its class nor its attributes nor its hooks. Here
    all of them stay. Only of a parameter that something else holds on to (a weak reference, several autograd graphs)
    a new one takes the place, tied ones together, with class, attributes and hooks; a warning names it. An autograd
    graph from before the move raises in its backward, and hooks on its nodes are not called any more.
    """
    places: dict[int, tuple[str, Any, list[tuple[nn.Module, str]]]] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                full_name = f"{path}.{name}" if path else name
                places.setdefault(id(parameter), (full_name, parameter, []))[2].append((owner, name))
    module.to(device)
    recurrent = [owner for owner in module.modules() if isinstance(owner, nn.RNNBase)]
    for owner in recurrent:  # it has made weak references to the new parameters
        owner._flat_weight_refs = []
    replaced = []
    for full_name, parameter, owners in places.values():
        moved: Any = owners[0][0]._parameters[owners[0][1]]
        if moved is None or moved is parameter:
            continue
        if isinstance(parameter, UninitializedParameter):  # torch has dropped the pending shape
            make: Any = type(parameter)
            moved = make(requires_grad=parameter.requires_grad, device=device, dtype=parameter.dtype)
        kind, attributes = type(parameter), parameter.__dict__
        try:
            torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]
            moved = parameter
        except RuntimeError:
            replaced.append(full_name)
        with suppress(TypeError):  # a class with slots, which none but the old object has
            moved.__class__, moved.__dict__ = kind, attributes
        _set_hooks(moved, parameter)
        for owner, name in owners:
            owner._parameters[name] = moved
    for owner in recurrent:
        owner._init_flat_weights()
    if replaced:
        _log.warning(
            "on the way to %s, %s of %s became new parameters, as a weak reference or an autograd graph holds on to "
            "the old ones: an optimizer or a list made before still has those",
            device,
            ", ".join(map(repr, replaced[:3])) + (" and others" if len(replaced) > 3 else ""),
            type(module).__name__,
        )


def _set_hooks(target: Any, source: Any) -> None:
    """Give ``target`` the hooks of ``source``, which may be itself.

    Swapping leaves them with the Python object, and autograd, which calls them, finds them by the values.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(source, name, None)) is not None:
            setattr(target, name, hooks)
