"""Gather nests of tensors from all ranks, one tensor at a time: no rank has room for a model twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchhal.distributed import collectives
from torchhal.pytree import map_tensors


@dataclass(frozen=True)
class _Outline:
    """A dense tensor that follows by itself."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, where: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=where)


def on_first_rank(mine: Any, device: torch.device, *, name: str = "gathering") -> list[Any] | None:
    """Return the ranks' nests, in their order and on the CPU, on rank 0; None on the others. All must call.

    Args:
        mine: dicts, lists and tuples; items that are not dense tensors must be picklable, and are sent together.
        device: of this rank.
        name: of the operation, for the error on ranks that are in another one.
    """
    outlines = collectives.all_gather_object(_outline(mine), name=name)
    where = collectives.host(device)
    if dist.get_rank() != 0:
        _map_dense(mine, lambda tensor: dist.send(_bytes(tensor, where), dst=0) if tensor.numel() else None)
        return None

    def receive(rank: int, outline: Any) -> Any:
        if not isinstance(outline, _Outline):
            return outline
        tensor = outline.empty(where)
        if tensor.numel():
            dist.recv(_bytes(tensor, where), src=rank)
        return tensor.cpu()

    own = _map_dense(mine, lambda tensor: tensor.detach().cpu())
    return [own, *(_map_outlines(outline, partial(receive, rank)) for rank, outline in enumerate(outlines[1:], 1))]


def on_every_rank(mine: Any, device: torch.device, *, name: str = "gathering") -> list[Any]:
    """Return the ranks' nests, in their order and on the CPU, on every rank. All must call."""
    outlines = collectives.all_gather_object(_outline(mine), name=name)
    where = collectives.host(device)

    def share(rank: int, leaf: Any) -> Any:
        if rank == dist.get_rank():
            if not _is_dense(leaf):
                return leaf
            tensor = leaf.detach().to(where).contiguous()
        elif isinstance(leaf, _Outline):
            tensor = leaf.empty(where)
        else:
            return leaf
        collectives.broadcast_tensors([tensor], src=rank)
        return tensor.cpu()

    outlines[dist.get_rank()] = mine
    return [_map_outlines(part, partial(share, rank)) for rank, part in enumerate(outlines)]


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_meta


def _map_dense(nest: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    return map_tensors(nest, lambda leaf: function(leaf) if _is_dense(leaf) else leaf)


def _map_outlines(nest: Any, function: Callable[[Any], Any]) -> Any:
    return map_tensors(nest, function, is_leaf=lambda leaf: isinstance(leaf, _Outline))


def _outline(nest: Any) -> Any:
    return _map_dense(nest, lambda tensor: _Outline(tensor.shape, tensor.dtype))


def _bytes(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """Return all of ``tensor`` as flat bytes, which every backend sends; its own memory if contiguous on ``where``."""
    dense = tensor.detach().to(where).resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)
