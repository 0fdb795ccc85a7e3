"""Send tensors and objects through Bagua, for the collectives of torchhal."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_SENT = (torch.float32, torch.float16, torch.int64, torch.uint8)  # dtypes that Bagua can send
_OPS = {dist.ReduceOp.SUM: "SUM", dist.ReduceOp.PRODUCT: "PRODUCT", dist.ReduceOp.MIN: "MIN", dist.ReduceOp.MAX: "MAX"}


def all_reduce(tensor: torch.Tensor, op: Any, *, group: Any = None) -> None:
    """Reduce a tensor in place by Bagua; by torch for groups that it doesn't know, and dtypes that it can't send."""
    if group is not None or tensor.dtype not in _SENT or not tensor.numel():
        dist.all_reduce(tensor, op, group=group)
        return
    from bagua.torch_api import communication

    communication.allreduce_inplace(tensor, op=communication.ReduceOp[_OPS[op]])


def broadcast_list(box: list[Any], src: int) -> None:
    """Replace the one object in ``box`` by that of rank ``src``."""
    from bagua.torch_api import communication

    box[0] = communication.broadcast_object(box[0], src)
