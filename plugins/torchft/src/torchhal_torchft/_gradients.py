"""Average gradients over the replica groups of a quorum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torchhal_torchft._group import ReplicaGroup


@torch.no_grad()
def average(group: ReplicaGroup, optimizer: Optimizer, *, contributes: bool = True) -> None:
    """Replace each gradient by its mean over the groups that contribute; ``group.errored()`` is set if that failed.

    A parameter that some group's step did not use counts there as a gradient of zero, as in
    DistributedDataParallel; one that no group used keeps none. A group that is alone has the mean already.

    Args:
        group: of this process, in a quorum.
        optimizer: whose parameters' gradients are averaged.
        contributes: False where the gradients are of other weights than the others'. The mean is then theirs.
    """
    if group.num_participants() == 1 or group.errored() is not None:
        return
    parameters = [
        parameter for part in optimizer.param_groups for parameter in part["params"] if parameter.requires_grad
    ]
    # Who contributes, and to what, travels with the first message: TorchFT divides by the groups that are there.
    given = [contributes and parameter.grad is not None for parameter in parameters]
    header = torch.tensor([contributes, *given], dtype=torch.float32)
    pieces: dict[torch.dtype, list[torch.Tensor]] = {torch.float32: [header]}
    for parameter, there in zip(parameters, given, strict=True):
        piece = _flat(parameter.grad if there and parameter.grad is not None else torch.zeros_like(parameter))
        pieces.setdefault(piece.dtype, []).append(piece.cpu())
    sums = {dtype: torch.cat(tensors) for dtype, tensors in pieces.items()}
    # The sum, as TorchFT's average divides by how many are there, those included that contribute nothing.
    for work in [group.allreduce(total, reduce_op=ReduceOp.SUM) for total in sums.values()]:
        work.wait()
    if group.errored() is not None:
        return
    contributors, *used = sums[torch.float32][: len(header)].tolist()
    at = dict.fromkeys(sums, 0)
    at[torch.float32] = len(header)
    for parameter, by in zip(parameters, used, strict=True):
        template = _flat(parameter)
        start = at[template.dtype]
        at[template.dtype] = end = start + template.numel()
        if not by:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mean = (sums[template.dtype][start:end] / contributors).to(parameter.device)
        if parameter.is_complex():
            mean = torch.view_as_complex(mean.view(*parameter.shape, 2))
        parameter.grad.copy_(mean.view(parameter.shape))


def _flat(tensor: torch.Tensor | nn.Parameter) -> torch.Tensor:
    """Return a tensor with one dimension and real numbers."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).detach().reshape(-1)
