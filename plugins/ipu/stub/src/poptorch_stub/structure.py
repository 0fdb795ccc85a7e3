"""Arguments and results as flat lists of tensors: dictionaries, lists and tuples are entered, all else is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def flatten(value: Any) -> list[torch.Tensor]:
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def rebuild(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """``value`` with its tensors replaced, in the order of :func:`flatten`."""
    return transform(value, lambda _: next(tensors))


def transform(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)({key: transform(item, function) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(transform(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(transform(item, function) for item in value)
    return value
