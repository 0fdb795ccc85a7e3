"""Moving a batch: any nesting of containers, tensors and objects that know ``.to``."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(batch: Any, function: Callable[[Any], Any], *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """``batch`` with ``function`` applied to each leaf; containers are rebuilt as what they were.

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
    """``batch`` with every tensor, and every object that has a method ``to``, on ``device``.

    An object with such a method moves itself, container or not: it may know that some part stays behind.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if not _moves_itself(leaf):
            return leaf
        try:
            moved = leaf.to(device, non_blocking=non_blocking)
        except TypeError:  # an own .to(device) without torch's keywords
            moved = leaf.to(device)
        return leaf if moved is None else moved  # moved in place

    return map_tensors(batch, move, is_leaf=_moves_itself)


def _moves_itself(item: Any) -> bool:
    return callable(getattr(item, "to", None)) and not isinstance(item, type)
