"""Move the tensors of a checkpoint from the CPU, to which they are read, according to ``map_location``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import serialization

from torchhal.checkpoint._inspection import is_tensor
from torchhal.pytree import map_tensors


def read(nest: Any) -> Any:
    """Return ``nest`` with every stand-in of :meth:`CheckpointIO.open_checkpoint` read, to the CPU.

    A stand-in with a method ``read_shared`` is given the dict in which those of one memory find each other.
    """
    memories: dict[Any, Any] = {}

    def value_of(leaf: Any) -> Any:
        if not is_tensor(leaf) or isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.read_shared(memories) if hasattr(leaf, "read_shared") else leaf.read()

    return map_tensors(nest, value_of, is_leaf=is_tensor)


def check_map_location(map_location: Any) -> None:
    """Raise TypeError for what is none of torch's forms."""
    if not (isinstance(map_location, str | torch.device | Mapping | None) or callable(map_location)):
        raise TypeError(f"'map_location' must be a device, its name, a callable, a dict or None (got {map_location!r})")


def apply_map_location(nest: Any, map_location: Any) -> Any:
    """Return ``nest`` with its tensors, which are on the CPU, moved according to torch's ``map_location``.

    Tensors that share memory still do.

    Args:
        nest: tensors on the CPU, at any depth of containers.
        map_location: as of :meth:`.CheckpointIO.load_checkpoint`; None and ``"cpu"`` return ``nest`` itself.

    Raises:
        TypeError: ``map_location`` has none of torch's forms.

    Checks: CIO-03.
    """
    check_map_location(map_location)
    if map_location in (None, "cpu"):
        return nest
    place = serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]  # as torch.load
    placed: dict[int, torch.UntypedStorage] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage = leaf.untyped_storage()
        if storage._cdata not in placed:
            placed[storage._cdata] = place(storage, "cpu")
        there = placed[storage._cdata]
        empty = torch.empty(0, dtype=leaf.dtype, device=there.device)
        return empty.set_(there, leaf.storage_offset(), leaf.shape, leaf.stride())

    return map_tensors(nest, move)
