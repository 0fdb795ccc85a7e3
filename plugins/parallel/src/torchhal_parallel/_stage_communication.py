"""Run a forward through the stages of a pipeline, one after another, and send activations between their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def forward_through_stages(
    values: tuple[torch.Tensor, ...],
    boundaries: Sequence[tuple[Any, Any]],
    roots: Mapping[int, nn.Module],
    *,
    group: Any,
    device: torch.device,
) -> Any:
    """Return what this rank's last stage gives for ``values``, which enter the first stage.

    Called on every rank of ``group``; rank r runs the stages r, r + size, ...

    Args:
        values: the inputs of the first stage.
        boundaries: (inputs, outputs) of each stage, as tensors on the meta device.
        roots: this rank's stages, by their indices.
        group: the process group of the pipeline.
        device: on which this rank receives.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for index in range(len(boundaries)):
        owner, previous = index % size, (index - 1) % size
        if index and owner != previous:
            if rank == previous:
                for value in values:
                    dist.send(value, group=group, group_dst=owner)
            elif rank == owner:
                values = tuple(
                    torch.empty(each.shape, dtype=each.dtype, device=device) for each in boundaries[index][0]
                )
                for value in values:
                    dist.recv(value, group=group, group_src=previous)
        if rank == owner:
            values = roots[index](*values)
    return values


def send_from_last(
    values: tuple[torch.Tensor, ...],
    boundaries: Sequence[tuple[Any, Any]],
    last_rank: int,
    *,
    group: Any,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Return what the last stage has given on every rank of ``group``, which all call.

    Args:
        values: on ``last_rank`` these; elsewhere they are ignored.
        boundaries: (inputs, outputs) of each stage, as tensors on the meta device.
        last_rank: the rank in ``group`` of the last stage.
        group: the process group of the pipeline.
        device: on which this rank receives.
    """
    if dist.get_rank(group) == last_rank:
        sent = tuple(value.contiguous() for value in values)
    else:
        sent = tuple(torch.empty(each.shape, dtype=each.dtype, device=device) for each in boundaries[-1][1])
    for value in sent:
        dist.broadcast(value, group=group, group_src=last_rank)
    return sent
