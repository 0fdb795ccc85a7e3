"""Gather values that ranks have different numbers of, and put them together along their first dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchhal.errors import DistributedError
from torchhal.strategies import Strategy


def gather_values(value: Any, strategy: Strategy, leaders: Sequence[bool]) -> Any:
    """Return ``value`` of all ranks, put together in their order. Every rank must call.

    Args:
        value: a tensor, of any size in its first dimension, a number, or a nest of these; the structure is the same on
            every rank.
        strategy: of the run.
        leaders: for each rank whether its samples count: ranks that share a batch have one leader.

    Raises:
        DistributedError: the structures, dtypes or other dimensions differ between ranks.
    """
    if strategy.world_size == 1:
        return concatenate([value])
    tensors: list[torch.Tensor] = []
    plain = _without_tensors(value, tensors)
    told = strategy.all_gather_object((plain, [(tuple(t.shape), str(t.dtype)) for t in tensors]))
    if len({len(shapes) for _, shapes in told}) > 1:
        raise DistributedError(
            "gather needs the same structure on every rank (got "
            + ", ".join(f"rank {rank}: {len(shapes)} tensor(s)" for rank, (_, shapes) in enumerate(told))
            + ")"
        )
    parts = [_gathered(each, [shapes[i] for _, shapes in told], strategy) for i, each in enumerate(tensors)]
    values = [
        _with_tensors(plain, iter([part[rank] for part in parts]))
        for rank, (plain, _) in enumerate(told)
        if leaders[rank]
    ]
    return concatenate(values)


def _gathered(tensor: torch.Tensor, kinds: Sequence[tuple[Any, str]], strategy: Strategy) -> list[torch.Tensor]:
    """Return the tensors of all ranks, which may differ in their first dimension alone."""
    if len({dtype for _, dtype in kinds}) > 1 or len({(len(shape), shape[1:]) for shape, _ in kinds}) > 1:
        listing = ", ".join(f"rank {rank}: {shape} {dtype}" for rank, (shape, dtype) in enumerate(kinds))
        raise DistributedError(
            f"gather needs one dtype, and the same dimensions but the first, on every rank (got {listing})"
        )
    tensor = tensor.detach()
    if not tensor.dim():
        return list(strategy.all_gather(tensor))
    most = max(shape[0] for shape, _ in kinds)
    if tensor.shape[0] < most:
        tensor = torch.cat([tensor, tensor.new_zeros((most - tensor.shape[0], *tensor.shape[1:]))])
    return [each[: shape[0]] for each, (shape, _) in zip(strategy.all_gather(tensor), kinds, strict=True)]


class _Place:
    """The place of a tensor in a structure."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place)

    __hash__ = object.__hash__


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place()
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_tensors(item, tensors) for item in value]
    if isinstance(value, tuple):
        return tuple(_without_tensors(item, tensors) for item in value)
    return value


def _with_tensors(value: Any, tensors: Any) -> Any:
    if isinstance(value, _Place):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if isinstance(value, tuple):
        return tuple(_with_tensors(item, tensors) for item in value)
    return value


def concatenate(values: Sequence[Any]) -> Any:
    """Return the values of several ranks as one: tensors along their first dimension, others in a list.

    Args:
        values: of the same structure. Tensors without a dimension and numbers become a 1-d tensor.
    """
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([value.detach().reshape(1) if not value.dim() else value.detach() for value in values])
    if isinstance(first, Mapping):
        return {key: concatenate([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(concatenate(list(items)) for items in zip(*values, strict=True))
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return torch.tensor(list(values))
    return list(values)
