"""Moving a batch: any nesting of containers, tensors and objects that know ``.to``."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(batch: Any, function: Callable[[Any], Any]) -> Any:
    """``batch`` with ``function`` applied to each leaf; containers are rebuilt as what they were.

    Dicts (subclasses too), lists, tuples, named tuples and dataclass instances are entered; everything else,
    str, numbers and None included, is a leaf. A container whose leaves all come back unchanged is returned
    itself, so that an identity costs no copy and keeps the user's object.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        new = {key: map_tensors(value, function) for key, value in batch.items()}
        if all(new[key] is value for key, value in batch.items()):
            return batch
        if type(batch) is dict:
            return new
        rebuilt: Any = copy.copy(batch)  # keeps default factories and attributes of subclasses
        try:
            rebuilt.update(new)
        except AttributeError:  # an immutable Mapping
            return type(batch)(new)  # type: ignore[call-arg]
        return rebuilt
    if isinstance(batch, tuple | list):
        items = [map_tensors(item, function) for item in batch]
        if all(new_item is item for new_item, item in zip(items, batch, strict=True)):
            return batch
        if hasattr(batch, "_fields"):
            return type(batch)(*items)
        return type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and not hasattr(batch, "to"):
        changed = {}
        for entry in dataclasses.fields(batch):
            value = getattr(batch, entry.name)
            moved = map_tensors(value, function)
            if moved is not value:
                changed[entry.name] = moved
        if not changed:
            return batch
        result = copy.copy(batch)
        for name, value in changed.items():
            object.__setattr__(result, name, value)  # frozen dataclasses and init=False fields alike
        return result
    return function(batch)


def move_to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """``batch`` with every tensor, and every object that has ``.to``, on ``device``."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        to = getattr(leaf, "to", None)
        if to is None or isinstance(leaf, type):
            return leaf
        try:
            moved = to(device, non_blocking=non_blocking)
        except TypeError:  # an own .to(device) without torch's keywords
            moved = to(device)
        return leaf if moved is None else moved  # moved in place

    return map_tensors(batch, move)
