"""Take a checkpoint apart: its tensors by name, and the rest with a reference where each tensor was.

The containers that are entered are those that a load of torch's file rebuilds: dict, OrderedDict with its attributes
(a state dictionary's ``_metadata``), list, tuple; exactly these, no subclass. What stands in another one, and tensors
that aren't dense, go with the plain data; torch's writer rejects by name what it can't hold.

While ranks compare what they have, a tensor is a :class:`Reference`. In the file it is ``{"__tensor__": name}``, for a
view ``{"__tensor__": [name, size, stride, offset]}``. A mapping of the user's that has this one key is
``{"__tensor__": {"__tensor__": value}}``.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchhal_parallel.checkpoint._reference import Reference

_MARK = "__tensor__"
_NUMBER = re.compile(r"-?\d+")


def flatten(checkpoint: Mapping[Any, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return (plain data with references, tensors by their path in the nest).

    Tensors that share memory stay separate; :func:`share` makes references of them.

    A path has one name, and a name one path, on all ranks: ``state_dict/layer.weight``.
    """
    tensors: dict[str, torch.Tensor] = {}

    def visit(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
                return value
            name = "/".join(path)
            tensors[name] = value.detach()
            return Reference(name)
        return _rebuilt(value, lambda key, item: visit(item, (*path, _step(key))))

    return visit(checkpoint, ()), tensors


def share(value: Any, shared: Mapping[str, Reference]) -> Any:
    """Return the nest with the references of tensors that lie in another one's memory, by name, in their places."""
    if isinstance(value, Reference):
        return shared.get(value.name, value)
    return _rebuilt(value, lambda _, item: share(item, shared))


def _step(key: Any) -> str:
    """Return a key as a part of a name, different for different ones.

    A text may have a slash in it, or look like a number.
    """
    if isinstance(key, int):
        return str(int(key))
    text = (key if isinstance(key, str) else repr(key)).replace("~", "~0").replace("/", "~1")
    if isinstance(key, str):
        return f"~s{text}" if _NUMBER.fullmatch(text) else text
    return f"~r{text}"


def _rebuilt(value: Any, visit: Callable[[Any, Any], Any]) -> Any:
    """Return a container of a known type with each item replaced; anything else as it is."""
    kind = type(value)
    if kind is dict:
        return {key: visit(key, item) for key, item in value.items()}
    if kind is OrderedDict:
        new = OrderedDict((key, visit(key, item)) for key, item in value.items())
        new.__dict__.update(vars(value))
        return new
    if kind in (list, tuple):
        return kind(visit(index, item) for index, item in enumerate(value))
    return value


def merge_flat(parts: list[Any]) -> Any:
    """Merge the plain data of all ranks, the first rank's where several have an item.

    Each rank holds the state of its own parameters.
    """
    first, *others = parts
    if type(first) in (dict, OrderedDict):
        whole = _rebuilt(first, lambda _, item: item)
        for other in others:
            if isinstance(other, dict):
                for key, value in other.items():
                    whole[key] = merge_flat([whole[key], value]) if key in whole else value
        return whole
    if type(first) in (list, tuple):
        same = [part for part in parts if type(part) is type(first) and len(part) == len(first)]
        return type(first)(merge_flat(list(column)) for column in zip(*same, strict=True))
    return first


def as_plain(value: Any) -> Any:
    """Return the nest with its references as the file has them."""
    if isinstance(value, Reference):
        if value.place is None:
            return {_MARK: value.name}
        size, stride, offset = value.place
        return {_MARK: [value.name, list(size), list(stride), offset]}
    plain = _rebuilt(value, lambda _, item: as_plain(item))
    return {_MARK: plain} if _is_marked(plain) else plain


def unflatten(value: Any, read: Callable[[Reference], Any]) -> Any:
    """Return the nest again, from :func:`as_plain`'s result, with ``read`` of each reference in its place."""
    if _is_marked(value):
        inside = value[_MARK]
        if isinstance(inside, str):
            return read(Reference(inside))
        if isinstance(inside, list):
            name, size, stride, offset = inside
            return read(Reference(name, (tuple(size), tuple(stride), offset)))
        value = inside
    return _rebuilt(value, lambda _, item: unflatten(item, read))


def _is_marked(value: Any) -> bool:
    return type(value) in (dict, OrderedDict) and len(value) == 1 and _MARK in value
