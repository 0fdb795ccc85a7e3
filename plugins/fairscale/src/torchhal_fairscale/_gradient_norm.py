"""Compute and clip by the norm of gradients of which each rank has some."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchhal.distributed import collectives


@torch.no_grad()
def total_norm(parameters: Sequence[torch.Tensor], owned: Sequence[bool], device: torch.device) -> torch.Tensor:
    """Return the 2-norm over all ranks' gradients, 0-d, computed as ``torch.nn.utils.get_total_norm`` does.

    Each rank sends the norms of its own gradients, so that the result is that of one process to the bit.

    Args:
        parameters: the same on every rank.
        owned: of which of them this rank has the gradient that counts.
        device: of this rank.
    """
    host = collectives.host(device)
    norms = torch.zeros(2, len(parameters), dtype=torch.float64)
    for index, (parameter, is_own) in enumerate(zip(parameters, owned, strict=True)):
        if is_own and parameter.grad is not None:
            norms[0, index] = torch.linalg.vector_norm(parameter.grad).double().cpu()
            norms[1, index] = 1
    norms = norms.to(host)
    dist.all_reduce(norms)
    dtypes = [parameter.dtype.to_real() for parameter in parameters]
    dtype = dtypes[0] if dtypes else torch.float32
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    found = norms[0][norms[1] > 0].to(dtype=dtype, device=device)
    return torch.linalg.vector_norm(found) if len(found) else torch.tensor(0.0, device=device)


def clip_by_norm(parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale the gradients that this rank has, as ``torch.nn.utils.clip_grad_norm_`` does."""
    nn.utils.clip_grads_with_norm_([each for each in parameters if each.grad is not None], max_norm, norm)
