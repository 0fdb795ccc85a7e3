"""Compare the structure of a module between ranks, and prepare its buffers for a broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchhal.distributed import collectives
from torchhal.errors import DistributedError


def check_same_tensors(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise DistributedError, on every rank, when names, shapes, dtypes or order of ``tensors`` differ."""
    described = [
        (name, "lazy" if is_lazy(tensor) else tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in tensors
    ]
    everybody = collectives.all_gather_object(described)
    for rank, others in enumerate(everybody[1:], start=1):
        if others != everybody[0]:
            pairs = zip_longest(everybody[0], others, fillvalue="nothing in its place")
            first = next(pair for pair in pairs if pair[0] != pair[1])
            raise DistributedError(
                "every rank must build the same model (names, shapes, dtypes, what is trained, in one order), but "
                f"where rank 0 has {first[0]}, rank {rank} has {first[1]}"
            )


def unshare_buffer_memory(module: nn.Module) -> None:
    """Give every buffer that repeats one element, as ``expand`` makes them, memory of its own: a broadcast writes."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and any(
                stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
            ):
                owner._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
