"""Tensors between their whole and their sharded form, and the global norm of gradients in either.

A parameter is a plain tensor, which every rank that has it has whole, or a DTensor, of which it has a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchhal.pytree import map_tensors

try:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError as error:  # distribute_tensor, which is public, would move the whole tensor to the device first
    raise ImportError(
        f"torch {torch.__version__} has no torch.distributed.tensor._utils.compute_local_shape_and_global_offset, by "
        "which a rank finds its part of a tensor: use another torch, or another torchhal-parallel"
    ) from error


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of ``tensor``, on every rank that has a part of it; they all must call.

    Of several mesh dimensions that divide it the outer one did so last, and is gathered first. ``full_tensor`` does the
    same in one call, and warns on every rank that it takes several collectives.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            tensor = tensor.redistribute(placements=[Replicate()] * (dim + 1) + list(tensor.placements[dim + 1 :]))
    return tensor.to_local()


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, which shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_like(value: torch.Tensor, target: DTensor) -> torch.Tensor:
    """Return of ``value``, whole on every rank, what this rank has of ``target``, which has its shape; a view.

    The slice is correct for every placement that ``fully_shard`` and ``parallelize_module`` make, the strided one of
    their composition included.
    """
    shape, offset = compute_local_shape_and_global_offset(value.shape, target.device_mesh, target.placements)
    return value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def shard_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return ``value``, whole on every rank, in the layout and on the device of ``target``, which has its shape.

    Nothing is sent: each rank takes its part, a copy.
    """
    if not isinstance(target, DTensor):
        return value.to(target.device)
    return DTensor.from_local(
        part_like(value, target).to(to_local(target).device, copy=True).contiguous(),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def is_below_float32(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has floating-point numbers of fewer than 32 bits."""
    return tensor.is_floating_point() and tensor.element_size() < 4


def place_of_part(tensor: torch.Tensor) -> Any:
    """Return (shape, offset) of this rank's part, or None for a whole tensor: the same on ranks with the same part."""
    if not isinstance(tensor, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def gather_to_cpu(value: Any, *, keep: bool) -> Any:
    """Return a nest with every sharded tensor whole and on the CPU, one at a time. Called on every rank.

    Where ``keep`` is False the result holds no data: tensors of the same shape on the meta device.
    """

    def gather(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        full = full_tensor(tensor.detach())
        return full.cpu() if keep else torch.empty_like(full, device="meta")

    return map_tensors(value, gather)


def get_total_norm(
    gradients: Iterable[torch.Tensor], *, squares: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the 2-norm over all elements of all ``gradients``, the same on every rank: a 0-d tensor.

    ``torch.nn.utils.clip_grad_norm_`` refuses plain and sharded gradients together, and ``.item()`` on a norm of a
    sharded tensor is this rank's alone, without an error. Here the squares of the parts are added up on each rank, and
    over each mesh dimension that a layout is sharded on by one collective for each dtype. Sums are in float32 at least,
    in float64 for gradients of it; of a complex gradient the absolute values count.

    Args:
        gradients: in the same order on every rank that shares a mesh.
        squares: what turns the sum of squares of these gradients into that of the whole model, where other ranks have
            other parameters.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        divided: Any = None
        if isinstance(gradient, DTensor):
            for placement in gradient.placements:
                if not isinstance(placement, Shard | Replicate) and type(placement).__name__ != "_StridedShard":
                    gradient = gradient.redistribute(gradient.device_mesh, [Replicate()] * gradient.device_mesh.ndim)
                    break
            sharded = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
            divided = (gradient.device_mesh, sharded) if sharded else None
        part = to_local(gradient).detach()
        norm = torch.linalg.vector_norm(part, dtype=torch.float32 if is_below_float32(part) else None)
        groups.setdefault((divided, norm.dtype, norm.device), []).append(norm)
    total: torch.Tensor | None = None
    for (divided, _, _), norms in groups.items():
        square = torch.stack(norms).square().sum()
        if divided is not None:
            mesh, sharded = divided
            for dim in sharded:
                dist.all_reduce(square, group=mesh.get_group(dim))
        total = square if total is None else total + square.to(total.device)
    if total is None:
        total = torch.zeros(())
    return (total if squares is None else squares(total)).sqrt()


def clip_grads_with_norm_(gradients: Iterable[torch.Tensor], norm: torch.Tensor, clip_val: float) -> None:
    """Scale ``gradients`` so that their global ``norm`` is at most ``clip_val``, as torch's own clipping does."""
    factor = (clip_val / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = to_local(gradient)
        part.mul_(factor.to(part.device))  # in its own dtype: a number of no dimension widens nothing
