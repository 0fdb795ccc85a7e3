"""Sizes of the dimensions of a device mesh: data, shard, pipeline and tensor; and the process groups of a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchhal.errors import ConfigurationError

AXES = ("pipeline", "data", "shard", "tensor")
"""From the outermost axis of the mesh to the innermost: neighbours share a tensor, which costs most to send."""

_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public since torch 2.14


class ParallelDims:
    """The sizes of the mesh dimensions that a user has chosen, by the names in :data:`AXES`.

    Args:
        sizes: of each dimension; None for the one that takes what the others leave of the world.

    Raises:
        ConfigurationError: a size is no int of at least 1, or several are None.
    """

    def __init__(self, sizes: Mapping[str, int | None]) -> None:
        for name, value in sizes.items():
            check_size(name, value)
        if sum(value is None for value in sizes.values()) > 1:
            raise ConfigurationError("at most one of 'data', 'shard', 'pipeline' and 'tensor' may be None")
        self.chosen = dict(sizes)

    def resolve(self, world_size: int) -> dict[str, int]:
        """Return the size of each dimension in a world of ``world_size`` processes.

        Raises:
            ConfigurationError: the sizes don't multiply to it.
        """
        chosen = self.chosen
        fixed = math.prod(value for value in chosen.values() if value is not None)
        if world_size % fixed or (fixed != world_size and None not in chosen.values()):
            listing = " x ".join(f"{name}={'?' if value is None else value}" for name, value in chosen.items())
            raise ConfigurationError(
                f"{listing} needs {'a multiple of ' if None in chosen.values() else ''}{fixed} processes, and there "
                f"are {world_size}: change an axis, or 'devices' and 'num_nodes'"
            )
        return {name: world_size // fixed if value is None else value for name, value in chosen.items()}


def check_size(name: str, value: Any) -> None:
    """Raise ConfigurationError unless ``value`` is an int of at least 1, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigurationError(f"{name!r} must be an int of at least 1, or None (got {value!r})")


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinate of a global rank on each axis of the mesh that :func:`build_mesh` makes."""
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


def build_mesh(device_type: str, sizes: Mapping[str, int], timeout: timedelta) -> DeviceMesh:
    """Return the mesh of all ranks, with ``timeout`` for each of its process groups."""
    mesh = init_device_mesh(device_type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    for axis in AXES:  # otherwise they would block for torch's timeout of half an hour
        _set_timeout(timeout, mesh.get_group(axis))
    return mesh


def make_batch_group(mesh: Any, sizes: Mapping[str, int], timeout: timedelta) -> Any:
    """Return the group of the ranks that have the same parameters, each with its own data; None for one rank alone.

    Every rank must call it: where it spans two dimensions of the mesh, process groups are made.
    """
    if sizes["data"] == 1 or sizes["shard"] == 1:
        axis = "data" if sizes["shard"] == 1 else "shard"
        return mesh.get_group(axis) if sizes[axis] > 1 else None
    ranks = mesh.mesh.movedim(AXES.index("pipeline"), -1).flatten(0, 1).flatten(1)  # (data x shard, others)
    own, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)  # type: ignore[no-untyped-call]
    return own


def groups_of(mesh: Any) -> list[Any]:
    """Return the process groups of ``mesh``, none where they are destroyed; None has none."""
    return list(mesh.get_all_groups()) if mesh is not None and dist.is_initialized() else []


def release_groups(mesh: Any, groups: Iterable[Any]) -> None:
    """Let go of the process groups of ``mesh``, and destroy those of ``groups`` that still exist; None has none.

    torch's caches of DTensor operators keep every mesh, and a gloo group that is kept keeps a thread for each pair of
    ranks, which wakes a hundred times a second. Later groups of the same names are looked up again. Where the default
    group is the user's, it stays, and would keep all that was made beside it.
    """
    if mesh is not None:
        root = getattr(mesh, "_root_mesh", None) or mesh
        getattr(root, "_pg_registry", {}).clear()
    for group in dict.fromkeys(groups):
        if dist.is_initialized() and group is not None and group is not dist.group.WORLD:
            with suppress(ValueError):  # it was destroyed before
                dist.destroy_process_group(group)
