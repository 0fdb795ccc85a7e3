"""A batch as several parts, and what a step returned for each of them as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from torchhal.errors import ModelError
from torchhal.pytree import map_tensors, move_to_device


def split_batch(batch: Any, parts: int) -> list[tuple[Any, int]]:
    """Return ``batch`` in at most ``parts`` parts of the same structure, each with its number of samples.

    Tensors are divided along their first dimension, into views whose sizes differ by at most one sample. So are
    lists, tuples and arrays of one item per sample that hold no tensor. Strings, numbers, None, 0-d tensors and any
    other object go to each part whole.

    Raises:
        ModelError: there is no tensor to divide, or their first dimensions differ.
    """
    size = _batch_size(batch)
    count = max(1, min(parts, size))
    if count == 1:
        return [(batch, size)]
    few, more = divmod(size, count)
    ends = list(accumulate([few + (index < more) for index in range(count)], initial=0))
    return [(rows_of(batch, size, start, end), end - start) for start, end in pairwise(ends)]


def _batch_size(batch: Any) -> int:
    sizes: list[tuple[int, ...]] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.dim():
                sizes.append(tuple(leaf.shape))
        elif callable(getattr(leaf, "to", None)) and not isinstance(leaf, type | torch.device | torch.dtype):
            raise ModelError(
                f"a {type(leaf).__name__} in the batch can't be divided among the devices: only tensors in dicts, "
                "lists, tuples and dataclasses can. Give the strategy split=..., a function (batch, parts) -> parts"
            )
        return leaf

    map_tensors(batch, look)
    if not sizes:
        raise ModelError(
            f"a batch of type {type(batch).__name__} holds no tensor that could be divided among the devices along its "
            "first dimension: use tensors in dicts, lists, tuples or dataclasses, or give the strategy split=..., a "
            "function (batch, parts) -> parts"
        )
    if len({shape[0] for shape in sizes}) > 1:
        raise ModelError(
            "the tensors of a batch must have the samples in their first dimension to be divided among the devices "
            f"(got the shapes {', '.join(map(str, sizes[:6]))}): make what belongs to no sample a buffer of the model, "
            "or give the strategy split=..., a function (batch, parts) -> parts"
        )
    return sizes[0][0]


def rows_of(batch: Any, size: int, start: int, end: int) -> Any:
    """Return the samples from ``start`` to ``end`` of a batch of ``size``; other first dimensions stay whole."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[start:end] if leaf.dim() and leaf.shape[0] == size else leaf
        shape = getattr(leaf, "shape", None)  # of an array
        if _one_per_sample(leaf, size) or (isinstance(shape, tuple) and shape[:1] == (size,)):
            return leaf[start:end]
        return leaf

    return map_tensors(batch, take, is_leaf=lambda item: _one_per_sample(item, size))


def _one_per_sample(value: Any, size: int) -> bool:
    """Return whether it is a sequence of ``size`` things other than tensors, such as the samples' names."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) != size:
        return False
    found = False

    def look(leaf: Any) -> Any:
        nonlocal found
        found = found or isinstance(leaf, torch.Tensor)
        return leaf

    map_tensors(value, look)
    return not found


def merge(values: Sequence[Any], sizes: Sequence[int], device: torch.device, name: str = "") -> Any:
    """Merge what a step returned for the parts of a batch into what it would have returned for the whole.

    Tensors are concatenated along their first dimension, on ``device``; without a dimension, floating-point ones
    are averaged by the parts' sizes and others summed. A list with one item per sample is continued; any other
    container is merged item by item. Floats are averaged, and all else must be the same for every part.

    Raises:
        ModelError: the parts gave different things; the message has ``name``.
    """
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        return _merge_tensors([value.to(device) for value in values], sizes)
    if len({type(value) for value in values}) > 1:
        raise _unlike(values, name)
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise _unlike(values, name)
        return _rebuild(
            first, [merge([value[key] for value in values], sizes, device, f"{name}[{key!r}]") for key in first]
        )
    if isinstance(first, list) and [len(value) for value in values] == list(sizes):
        return _rebuild_list(first, [move_to_device(item, device) for value in values for item in value])
    if isinstance(first, list | tuple) or (dataclasses.is_dataclass(first) and not isinstance(first, type)):
        children = [_children(value) for value in values]
        if len({len(items) for items in children}) > 1:
            raise _unlike(values, name)
        merged = [
            merge(items, sizes, device, f"{name}[{index}]") for index, items in enumerate(zip(*children, strict=True))
        ]
        return _rebuild(first, merged)
    if isinstance(first, float):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    if any(value is not first and not _same(value, first) for value in values):
        raise _unlike(values, name)
    return first


def merge_training(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Merge what ``training_step`` returned for the parts into one with the mean loss of the whole batch.

    None where any part skips it.
    """
    if any(output is None for output in outputs):
        return None
    if not any(isinstance(output, Mapping) for output in outputs):
        return _mean_loss(outputs, sizes, device)
    if not all(isinstance(output, Mapping) for output in outputs):
        return merge(outputs, sizes, device)  # which refuses: a dict and no dict
    losses = [output.get("loss") for output in outputs]
    if any(loss is None for loss in losses):
        return outputs[[loss is None for loss in losses].index(True)]
    rest = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
    return {"loss": _mean_loss(losses, sizes, device), **merge(rest, sizes, device)}


def _mean_loss(losses: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    for loss in losses:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return loss  # no loss at all: the loop handles it
    return weighted_mean([loss.to(device) for loss in losses], sizes)


def _same(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except (TypeError, ValueError, RuntimeError):  # arrays compare item by item
        return False


def weighted_mean(values: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the mean over the samples of all parts, from those over each part; of one shape and device."""
    total = sum(sizes)
    mean = values[0] * (sizes[0] / total)
    for value, size in zip(values[1:], sizes[1:], strict=True):
        mean = mean + value * (size / total)
    return mean


def _merge_tensors(values: list[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    if values[0].dim():
        return torch.cat(values)
    if values[0].is_floating_point() or values[0].is_complex():
        return weighted_mean(values, sizes)
    return torch.stack(values).sum()


def _children(value: Any) -> list[Any]:
    found: list[Any] = []

    def look(item: Any) -> Any:
        found.append(item)
        return item

    map_tensors(value, look, is_leaf=lambda item: item is not value)
    return found


def _rebuild(container: Any, items: list[Any]) -> Any:
    """Return a container of the same kind with other items, in the order in which ``map_tensors`` meets them."""
    remaining = iter(items)
    return map_tensors(container, lambda _: next(remaining), is_leaf=lambda item: item is not container)


def _rebuild_list(old: list[Any], items: list[Any]) -> list[Any]:
    return items if type(old) is list else type(old)(items)


def _unlike(values: Sequence[Any], name: str) -> ModelError:
    listing = ", ".join(repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}" for value in values[:4])
    return ModelError(
        f"the parts of a batch gave different things for what the step returned{name and ' in ' + name} ({listing}): "
        "return tensors, which are concatenated, or without a dimension averaged (floats) or summed (integers)"
    )
