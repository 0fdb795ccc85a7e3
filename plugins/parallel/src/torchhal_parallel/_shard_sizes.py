"""Compute which part of each parameter a rank holds, for estimates of memory before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchhal.memory_estimate import MemoryEstimate, ModelMemory, ParameterMemory, bytes_of
from torchhal_parallel._pipeline_split import (
    check_trained,
    shared_or_unused_parameters,
    split_into_stages,
    stage_parameters,
)
from torchhal_parallel._tensor_parallel import sharded_dim
from torchhal_parallel._wrap_policy import find_blocks


def divided(shape: Sequence[int], size: int, dim: int = 0) -> tuple[int, ...]:
    """Return ``shape`` with dimension ``dim`` divided among ``size`` ranks, rounded up: the part of the first one.

    A parameter of no dimension is whole on every rank.
    """
    if not len(shape):
        return ()
    return tuple(-(-length // size) if index == dim else length for index, length in enumerate(shape))


def tensor_shapes(module: nn.Module, plan: Mapping[str, Any], size: int) -> dict[int, tuple[int, ...]]:
    """Return the shape of each divided parameter on one of ``size`` ranks of a resolved plan, by its id."""
    shapes: dict[int, tuple[int, ...]] = {}
    for name, style in plan.items():
        layer = module.get_submodule(name)
        dim = sharded_dim(layer, style)
        if dim is None:
            continue
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        shapes[id(weight)] = divided(weight.shape, size, dim)
        bias = getattr(layer, "bias", None)
        if isinstance(bias, torch.Tensor) and dim == 0:
            shapes[id(bias)] = divided(bias.shape, size)
    return shapes


def stages_of_ranks(module: nn.Module, points: Sequence[str], size: int) -> list[dict[str, torch.Tensor]]:
    """Parameters and buffers of each rank of a pipeline of ``size``, by name; rank r has stages r, r + size, ...

    Raises:
        ModelError: one that is trained is in several stages, or in none.
    """
    parts = split_into_stages(module, points)
    check_trained(module, shared_or_unused_parameters(module, parts))
    stages = [stage_parameters(module, stage) for stage in parts]
    used = {name for stage in stages for name in stage}
    everywhere = {  # what no stage uses stays on all ranks, as the step may use it
        name: tensor for name, tensor in (*module.named_parameters(), *module.named_buffers()) if name not in used
    }
    return [
        {name: tensor for stage in stages[rank::size] for name, tensor in stage.items()} | everywhere
        for rank in range(size)
    ]


def gathered_bytes(
    model: ModelMemory,
    held: Iterable[ParameterMemory],
    shapes: Mapping[int, Sequence[int]],
    policy: Any,
    *,
    keep: bool,
    dtype: torch.dtype | None = None,
) -> int:
    """Return the bytes of ``fully_shard`` beside the shards, at most: whole parameters, and one unit's whole gradients.

    Args:
        model: on the meta device.
        held: the parameters that are sharded.
        shapes: of what is whole to a rank, where tensor parallelism has divided it before, by the parameter's id.
        policy: see :func:`~torchhal_parallel._wrap_policy.find_blocks`.
        keep: parameters stay whole from the forward to the backward.
        dtype: in which they are gathered; None for their own.
    """
    own = {id(entry.parameter): entry for entry in held if entry.parameter.dim()}

    def needed(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
        whole = gradients = 0
        for parameter in parameters:
            if id(parameter) in own:
                entry = own.pop(id(parameter))
                count, gradient, _ = entry.parts(shapes.get(id(parameter)))
                scale = dtype.itemsize / parameter.element_size() if dtype is not None else 1.0
                whole += round(count * scale)
                gradients += round(gradient * scale)
        return whole, gradients

    units = [needed(unit.parameters()) for _, unit in find_blocks(model.module, policy)]
    root = needed(model.module.parameters())
    largest = max((gradients for _, gradients in units), default=0)
    if keep:
        return sum(whole for whole, _ in units) + root[0] + max(largest, root[1])
    # the unit that computes and the one that is fetched meanwhile; what is in no unit stays until the end
    both = sum(sorted((whole for whole, _ in units), reverse=True)[:2])
    return root[0] + both + max(largest, root[1])


def buffers_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the buffers among the tensors of a stage."""
    distinct = {id(tensor): tensor for tensor in tensors.values() if not isinstance(tensor, nn.Parameter)}
    return sum(map(bytes_of, distinct.values()))


def _stage_memory(
    model: ModelMemory,
    stage: Mapping[str, torch.Tensor] | None,
    shapes: Mapping[int, tuple[int, ...]],
    shards: int,
    kept_whole: Collection[str],
) -> tuple[MemoryEstimate, Sequence[ParameterMemory]]:
    """Return the memory of a rank with the tensors of ``stage``, and the parameters that it has, whole or in part.

    Args:
        model: on the meta device.
        stage: parameters and buffers by name; None for those of the whole model.
        shapes: of the parameters that tensor parallelism divides, by id.
        shards: ranks that divide each parameter.
        kept_whole: names of the parameters that are not sharded.
    """
    held, buffers = model.parameters, model.buffers
    if stage is not None:
        mine = {id(tensor) for tensor in stage.values()}
        held = tuple(entry for entry in held if id(entry.parameter) in mine)
        buffers = buffers_of(stage)

    def shape_of(entry: ParameterMemory) -> tuple[int, ...]:
        shape = shapes.get(id(entry.parameter), tuple(entry.parameter.shape))
        return shape if entry.name in kept_whole else divided(shape, shards)

    return model.estimate(shape_of, parameters=held, buffers=buffers), held


@dataclass(frozen=True)
class RankMemory:
    """What one rank of a mesh holds between two steps.

    Args:
        stage: its place in the pipeline.
        estimate: of what it holds, its ``temporary`` included.
        held: the parameters that it has, whole or in part.
        shapes: of those that tensor parallelism has divided, by id.
        tensors: parameters and buffers of its stages by name; None for those of the whole model.
    """

    stage: int
    estimate: MemoryEstimate
    held: Sequence[ParameterMemory]
    shapes: Mapping[int, tuple[int, ...]]
    tensors: Mapping[str, torch.Tensor] | None


def rank_memories(
    model: ModelMemory,
    sizes: Mapping[str, int],
    *,
    plan: Mapping[str, Any],
    points: Sequence[str] | None,
    kept_whole: Collection[str],
    gathered: Callable[[Sequence[ParameterMemory], Mapping[int, Sequence[int]]], int],
) -> list[RankMemory]:
    """Return the memory of a rank of each stage, on a mesh with dimensions of ``sizes``.

    Args:
        model: on the meta device.
        sizes: of the mesh dimensions ``data``, ``shard``, ``pipeline`` and ``tensor``.
        plan: of the layers that the ranks of ``tensor`` share, resolved; empty without.
        points: modules at which a stage of the pipeline begins; None without one.
        kept_whole: names of the parameters that are not sharded.
        gathered: gives the bytes that a rank needs beside its shards, for its parameters and ``tensor`` shapes by id.
    """
    shapes = tensor_shapes(model.module, plan, sizes["tensor"]) if plan else {}
    stages = [None] if points is None else stages_of_ranks(model.module, points, sizes["pipeline"])

    def memory(index: int, stage: Mapping[str, torch.Tensor] | None) -> RankMemory:
        found, held = _stage_memory(model, stage, shapes, sizes["shard"], kept_whole)
        if sizes["shard"] > 1:
            found = found.plus(gathered(held, shapes))
        elif sizes["data"] > 1:
            found = found.plus(found.gradients, "gradients are averaged in one piece")
        return RankMemory(index, found, held, shapes, stage)

    return [memory(index, stage) for index, stage in enumerate(stages)]
