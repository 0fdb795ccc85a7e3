"""Gather values that ranks have different numbers of, and put them together along their first dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchhal.errors import DistributedError
from torchhal.pytree import map_tensors
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

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Place()

    plain = map_tensors(value, take)
    told = strategy.all_gather_object((plain, [(tuple(t.shape), str(t.dtype)) for t in tensors]))
    if len({len(shapes) for _, shapes in told}) > 1:
        raise DistributedError(
            "gather needs the same structure on every rank (got "
            + ", ".join(f"rank {rank}: {len(shapes)} tensor(s)" for rank, (_, shapes) in enumerate(told))
            + ")"
        )
    parts = [_gathered(each, [shapes[i] for _, shapes in told], strategy) for i, each in enumerate(tensors)]

    def filled(rank: int) -> Any:
        mine = (part[rank] for part in parts)
        return map_tensors(told[rank][0], lambda leaf: next(mine) if isinstance(leaf, _Place) else leaf)

    return concatenate([filled(rank) for rank in range(len(told)) if leaders[rank]])


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
