"""Collectives that are right where the backends are silently wrong.

gloo's all_reduce and broadcast of a strided view work on other elements than the view's, ranks with different
dtypes or shapes get garbage without an error, and half-precision sums overflow. So every tensor here is made
dense first, what the ranks bring is compared before anything is sent, and sums run in a wider dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torchhal.accelerators.transfer import map_tensors
from torchhal.errors import DistributedError

_OPS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def check_op(op: str) -> None:
    if op not in _OPS:
        raise ValueError(f"'op' must be one of {', '.join(map(repr, _OPS))} (got {op!r})")


def all_gather_object(value: Any, group: Any = None) -> list[Any]:
    """Every rank's picklable ``value`` in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _agree(description: Any, what: str, group: Any) -> None:
    """Raise on every rank alike unless all ranks brought the same ``description``."""
    everybody = all_gather_object(description, group)
    if any(other != everybody[0] for other in everybody[1:]):
        listing = "; ".join(f"rank {rank}: {entry}" for rank, entry in enumerate(everybody))
        raise DistributedError(f"{what} needs the same on every rank, but the ranks brought {listing}")


def _describe(value: Any) -> Any:
    """Structure, dtype and shape of a nest, comparable and picklable; mappings sorted by key."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape))
    if isinstance(value, Mapping):
        return {str(key): _describe(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    return type(value).__name__


def reduce(value: Any, op: str, *, device: torch.device, group: Any = None) -> Any:
    """See ``Strategy.reduce``."""
    check_op(op)
    _agree(_describe(value), f"reduce(op={op!r})", group)
    return _reduce_nest(value, op, device, group)


def _reduce_nest(value: Any, op: str, device: torch.device, group: Any) -> Any:
    if isinstance(value, Mapping):
        reduced = {key: _reduce_nest(value[key], op, device, group) for key in sorted(value, key=str)}
        return map_items(value, reduced)
    if isinstance(value, list | tuple):
        items = [_reduce_nest(item, op, device, group) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, torch.Tensor):
        return reduce_tensor(value, op, device=device, group=group)
    if isinstance(value, bool | int | float):
        return reduce_tensor(torch.tensor(value, dtype=torch.float64), op, device=device, group=group).item()
    return value


def map_items(original: Mapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    """``values`` in the order and type of ``original``."""
    ordered = {key: values[key] for key in original}
    return ordered if type(original) is dict else type(original)(ordered)  # type: ignore[call-arg]


def reduce_tensor(tensor: torch.Tensor, op: str, *, device: torch.device, group: Any = None) -> torch.Tensor:
    """One tensor, the same shape and dtype on every rank (unchecked), into a new one of its dtype.

    A mean of integers is a float; a sum of booleans counts.
    """
    mean = op in ("mean", "avg")
    work = tensor.detach().to(device)
    if work.dtype is torch.bool and op in ("sum", "mean", "avg"):
        work = work.to(torch.int64)
    result_dtype = work.dtype
    if not work.is_floating_point() and not work.is_complex():
        if mean:
            work, result_dtype = work.to(torch.float32), torch.float32
        elif work.dtype is torch.bool:
            work = work.to(torch.uint8)
    elif work.dtype in (torch.float16, torch.bfloat16):
        work = work.to(torch.float32)
    # a private dense copy: the input is never written, and strides mean nothing to the backend
    buffer = work.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(buffer, _OPS[op], group=group)
    if mean:
        buffer = buffer / dist.get_world_size(group)
    return buffer.to(result_dtype)


def broadcast_object(value: Any, src: int, *, device: torch.device) -> Any:
    """Rank ``src``'s value; tensors that lay on its device arrive on ``device``, those on its CPU on the CPU."""
    world_size = dist.get_world_size()
    if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < world_size:
        raise ValueError(f"'src' must be a rank from 0 to {world_size - 1} (got {src!r})")
    if dist.get_rank() == src:
        box = [map_tensors(value, lambda leaf: _Shipped(leaf) if isinstance(leaf, torch.Tensor) else leaf)]
    else:
        box = [None]
    dist.broadcast_object_list(box, src=src)
    if dist.get_rank() == src:
        return value
    return map_tensors(box[0], lambda leaf: leaf.unpack(device) if isinstance(leaf, _Shipped) else leaf)


class _Shipped:
    """A tensor on its way through pickle: dense, on the CPU, remembering whether it came from a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        self.on_device = tensor.device.type != "cpu"

    def unpack(self, device: torch.device) -> torch.Tensor:
        return self.tensor.to(device) if self.on_device else self.tensor


def all_gather(
    tensor: torch.Tensor, *, device: torch.device, group: Any = None, sync_grads: bool = False
) -> torch.Tensor:
    """See ``Strategy.all_gather``. Different shapes or dtypes raise on every rank."""
    _agree((str(tensor.dtype), tuple(tensor.shape)), "all_gather", group)
    world_size = dist.get_world_size(group)
    dense = tensor.to(device).contiguous()
    if sync_grads:
        # torch.distributed.nn.functional.all_gather has a wrong backward for some layouts; this one is right
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        flat = all_gather_tensor_autograd(dense.reshape(-1), 0, group or dist.group.WORLD)
        return flat.reshape(world_size, *tensor.shape)
    parts = [torch.empty_like(dense) for _ in range(world_size)]
    dist.all_gather(parts, dense.detach(), group=group)
    return torch.stack(parts)


def broadcast_tensors(tensors: list[torch.Tensor], *, src: int = 0, group: Any = None) -> None:
    """Overwrite ``tensors``, the same list on every rank, with rank ``src``'s values: one message per dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not tensor.is_sparse:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    with torch.no_grad():
        for dtype, members in by_dtype.items():
            flat = torch.cat([member.detach().reshape(-1) for member in members])
            payload = flat.view(torch.uint8) if dtype is torch.bool else flat
            dist.broadcast(payload, src=src, group=group)
            for member, part in zip(members, flat.split([member.numel() for member in members]), strict=True):
                member.detach().copy_(part.view_as(member))


def average_gradients(parameters: list[torch.nn.Parameter], group: Any = None) -> None:
    """Replace each ``.grad`` by its mean over the ranks; one that exists on some rank only counts as zero elsewhere.

    Averaging again what is already equal changes nothing, so this may follow every backward of an accumulation.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return
    device = trainable[0].device
    present = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.uint8, device=device)
    dist.all_reduce(present, dist.ReduceOp.MAX, group=group)
    world_size = dist.get_world_size(group)
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter, used in zip(trainable, present.tolist(), strict=True):
        if not used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
    for members in by_dtype.values():
        gradients = [member.grad for member in members if member.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= world_size
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
