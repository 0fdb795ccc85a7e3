"""Average gradients, whole and sharded ones, over the ranks that have the same parameters and other data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchhal.distributed import collectives
from torchhal_parallel._dtensor_layout import to_local


def average_gradients(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """Average the gradients, sharded ones part by part, over ranks that have the same parts.

    A gradient that exists on some of these ranks only counts as zero on the others.
    """
    size = dist.get_world_size(group)
    collectives.average_gradients([p for p in parameters if not isinstance(p, DTensor)], group, frozen=True)
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not sharded:
        return
    there = torch.tensor([parameter.grad is not None for parameter in sharded], dtype=torch.uint8)
    there = there.to(to_local(sharded[0].detach()).device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter, somewhere in zip(sharded, there.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            part = to_local(parameter.grad)
            by_dtype.setdefault(part.dtype, []).append(part)
    for parts in by_dtype.values():
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=group)
        flat /= size
        for part, averaged in zip(parts, flat.split([part.numel() for part in parts]), strict=True):  # type: ignore[no-untyped-call]
            part.copy_(averaged.view_as(part))
