"""Collectives that are correct where the backends are silently wrong.

gloo's all_reduce and broadcast of a strided view work on other elements than the view's, ranks with different
dtypes or shapes get garbage without an error, and narrow dtypes overflow in a sum. So every tensor here is made
dense first, sums run in a wider dtype, and before anything is sent the ranks compare their calls: a mismatch
raises the same error on all ranks instead of a wrong number or a hang.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchhal.errors import DistributedError
from torchhal.pytree import map_tensors
from torchhal.step_memory import MESSAGE_BYTES

__all__ = [
    "agree",
    "all_gather",
    "all_gather_object",
    "average_gradients",
    "broadcast_copies",
    "broadcast_object",
    "broadcast_tensors",
    "check_gatherable",
    "check_op",
    "check_src",
    "host",
    "reduce",
    "reduce_tensor",
]

_OPS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_MEANS = ("mean", "avg")


def check_op(op: str) -> None:
    if op not in _OPS:
        raise ValueError(f"'op' must be one of {', '.join(map(repr, _OPS))} (got {op!r})")


# -- what the ranks must have in common ----------------------------------------------------------------------


def agree(what: str, description: Any, group: Any = None) -> None:
    """Raise DistributedError on every rank unless all entered the same call, with the same ``description``."""
    everybody = all_gather_object(description, group, name=what)
    if any(other != everybody[0] for other in everybody[1:]):
        listing = "; ".join(f"rank {rank}: {_shorten(brought)}" for rank, brought in enumerate(everybody))
        raise DistributedError(f"{what} needs the same on every rank, but the ranks brought {listing}")


def _shorten(description: Any) -> str:
    text = description if isinstance(description, str) else repr(description)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _describe(leaf: Any) -> Any:
    """Return what must be the same on all ranks for this leaf: a tensor's kind, a number's type, else only the type."""
    if isinstance(leaf, torch.Tensor):
        kind = str(leaf.dtype).removeprefix("torch.")
        return (kind if leaf.layout is torch.strided else f"{kind}, {leaf.layout}", tuple(leaf.shape))
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        return "an int of more than 64 bits"
    return type(leaf).__name__


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a nest, in the order and over the containers of ``map_tensors``."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


# -- reduce --------------------------------------------------------------------------------------------------


def host(device: torch.device, group: Any = None) -> torch.device:
    """Return the device for collectives on values of the hosts.

    This is the CPU, unless ``group`` carries only ``device``'s tensors.

    On the CPU, the collective doesn't wait for work queued on the device.
    """
    try:
        everyone: Any = group or dist.group.WORLD
        everyone._get_backend(torch.device("cpu"))
    except RuntimeError:
        return device
    return torch.device("cpu")


def reduce(
    value: Any,
    op: str,
    *,
    device: torch.device,
    group: Any = None,
    alone: bool = False,
    all_reduce: Callable[..., Any] = dist.all_reduce,
) -> Any:
    """See ``Strategy.reduce``. ``alone``: a world of one without a process group; the result has the same types.

    ``all_reduce(tensor, op, group=group)`` combines tensors in place, for a device whose tensors no process group
    carries; numbers always go through torch.
    """
    check_op(op)
    leaves = list(_leaves(value))
    # ranks may have inserted their keys in another order: by path, all reduce the same things together
    order = sorted(range(len(leaves)), key=lambda index: leaves[index][0])
    if not alone:
        agree(f"reduce(op={op!r})", {leaves[index][0]: _describe(leaves[index][1]) for index in order}, group)
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise TypeError(f"'value' must hold dense tensors, but value{path} is {leaf.layout}: use .to_dense()")
    results: list[Any] = [None] * len(leaves)
    for index in order:
        results[index] = _reduce_leaf(leaves[index][1], op, device, group, alone, all_reduce)
    remaining = iter(results)
    return map_tensors(value, lambda _: next(remaining))


def _reduce_leaf(
    leaf: Any, op: str, device: torch.device, group: Any, alone: bool, all_reduce: Callable[..., Any]
) -> Any:
    if isinstance(leaf, torch.Tensor):
        return reduce_tensor(leaf, op, device=device, group=group, alone=alone, all_reduce=all_reduce)
    if isinstance(leaf, bool | int | float):
        dtype = torch.float64 if isinstance(leaf, float) or op in _MEANS else torch.int64
        where = torch.device("cpu") if alone else host(device, group)
        number = torch.tensor(leaf, dtype=dtype, device=where)
        reduced = reduce_tensor(number, op, device=where, group=group, alone=alone).item()
        return bool(reduced) if isinstance(leaf, bool) and op in ("min", "max", "product") else reduced
    return leaf


def reduce_tensor(
    tensor: torch.Tensor,
    op: str,
    *,
    device: torch.device,
    group: Any = None,
    alone: bool = False,
    all_reduce: Callable[..., Any] = dist.all_reduce,
) -> torch.Tensor:
    """Reduce one tensor, of one shape and dtype on every rank (unchecked), into a new one on ``device``.

    The result has the tensor's dtype, with torch's own exceptions: a mean of integers or booleans has the default
    dtype, a sum or product of them is int64.
    """
    work = tensor.detach().to(device)
    result_dtype = work.dtype
    if not work.is_floating_point() and not work.is_complex():
        if op in _MEANS:
            result_dtype = torch.get_default_dtype()
        elif op in ("sum", "product"):
            result_dtype = torch.int64
        work = work.to(torch.int64)
    elif work.is_floating_point() and work.element_size() < 4:
        work = work.to(torch.float32)
    # a private dense copy: the input is never written, and the backend ignores strides
    buffer = _dense(work)
    if not alone:
        all_reduce(buffer, _OPS[op], group=group)
        if op in _MEANS:
            buffer = buffer / dist.get_world_size(group)
    return buffer.to(result_dtype)


# -- gather --------------------------------------------------------------------------------------------------


def all_gather_object(value: Any, group: Any = None, *, name: str = "all_gather_object") -> list[Any]:
    """Return every rank's picklable ``value`` in rank order.

    A value that can't be pickled is an error on every rank.

    ``name`` is sent along: ranks in different calls raise an error instead of mixing up each other's data.
    """
    data, problem = _pickled((name, value))
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, data if problem is None else str(problem), group=group)
    if problem is not None:
        raise problem
    for rank, received in enumerate(gathered):
        if isinstance(received, str):
            raise DistributedError(f"rank {rank} could not send its value: {received}")
    everybody = [pickle.loads(received) for received in gathered]
    if any(other != name for other, _ in everybody):
        listing = ", ".join(f"rank {rank} in {other!r}" for rank, (other, _) in enumerate(everybody))
        raise DistributedError(
            f"the ranks are in different collectives: {listing}. Every rank must make the same calls in the same order "
            "(no logging, saving or barrier under 'if rank == 0')"
        )
    return [received for _, received in everybody]


def _pickled(value: Any) -> tuple[bytes, Exception | None]:
    """Return the pickled value, or the error in its place: the other ranks, which wait, must receive it first."""
    buffer = io.BytesIO()
    try:
        pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        problem = TypeError(f"'value' must be picklable (got a {type(value).__name__}: {error})")
        problem.__cause__ = error
        return b"", problem
    return buffer.getvalue(), None


def all_gather(
    tensor: torch.Tensor, *, device: torch.device, group: Any = None, sync_grads: bool = False
) -> torch.Tensor:
    """See ``Strategy.all_gather``. Different shapes or dtypes raise on every rank."""
    agree(f"all_gather(sync_grads={sync_grads})", _describe(tensor), group)
    check_gatherable(tensor)
    world_size = dist.get_world_size(group)
    dense = tensor.to(device)
    if sync_grads:
        # torch.distributed.nn.functional.all_gather has a wrong backward for some layouts; this one is right
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        everyone: Any = group or dist.group.WORLD
        flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
        gathered: torch.Tensor = all_gather_tensor_autograd(flat, 0, everyone)
        return gathered.reshape(world_size, *tensor.shape)
    data = _bytes(dense)
    parts = [torch.empty_like(data) for _ in range(world_size)]
    dist.all_gather(parts, data, group=group)
    return torch.cat(parts).view(dense.dtype).reshape(world_size, *dense.shape)


def check_gatherable(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise TypeError(f"'tensor' must be a dense torch.Tensor (got {tensor!r}); for anything else: all_gather_object")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with dense memory: no strides, no conjugation or sign still to be applied."""
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, flat and as bytes: a backend supports some dtypes, but all transfer bytes."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1 or flat.is_conj() or flat.is_neg():
        flat = _dense(flat)
    return flat.view(torch.uint8)


def _split(flat: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = flat.split(sizes)  # type: ignore[no-untyped-call]
    return parts


# -- broadcast -----------------------------------------------------------------------------------------------


def check_src(src: int, world_size: int) -> None:
    if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < world_size:
        raise ValueError(f"'src' must be a rank, from 0 to {world_size - 1} (got {src!r})")


def broadcast_object(
    value: Any,
    src: int,
    *,
    device: torch.device,
    send: Callable[[list[Any], int], None] = dist.broadcast_object_list,
) -> Any:
    """Return rank ``src``'s value; tensors from its device arrive on ``device``, those from its CPU on the CPU.

    ``send(box, src)`` puts rank ``src``'s one object into every rank's ``box``, for a strategy with its own transport.
    """
    check_src(src, dist.get_world_size())
    agree("broadcast", f"src={src}")
    is_source = dist.get_rank() == src
    box: list[Any] = [None]
    problem: Exception | None = None
    if is_source:
        shipped = map_tensors(value, lambda leaf: _Shipped(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        data, problem = _pickled(shipped)
        box = [data if problem is None else str(problem)]
    send(box, src)
    if problem is not None:
        raise problem
    if is_source:
        return value
    if isinstance(box[0], str):
        raise DistributedError(f"rank {src} could not send its value: {box[0]}")
    received = pickle.loads(box[0])
    return map_tensors(received, lambda leaf: leaf.unpack(device) if isinstance(leaf, _Shipped) else leaf)


class _Shipped:
    """A tensor on its way through pickle: dense, on the CPU, with a flag for whether it was on a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        on_cpu = tensor.detach().to("cpu")
        # a view would be pickled with its whole storage, and torch doesn't unpickle 8-bit floating-point numbers
        self.as_bytes = on_cpu.layout is torch.strided and not on_cpu.is_quantized
        self.tensor = _bytes(_dense(on_cpu)) if self.as_bytes else on_cpu
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.on_device = tensor.device.type != "cpu"

    def unpack(self, device: torch.device) -> torch.Tensor:
        tensor = self.tensor.view(self.dtype).reshape(self.shape) if self.as_bytes else self.tensor
        return tensor.to(device) if self.on_device else tensor


def broadcast_tensors(tensors: Sequence[torch.Tensor], *, src: int = 0, group: Any = None) -> None:
    """Overwrite dense ``tensors``, on every rank the same list of shapes and dtypes, with rank ``src``'s values."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        if bucket and (size + tensor.nbytes > MESSAGE_BYTES or tensor.device != bucket[0].device):
            _broadcast_bucket(bucket, src, group)
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        _broadcast_bucket(bucket, src, group)


def _broadcast_bucket(bucket: list[torch.Tensor], src: int, group: Any) -> None:
    with torch.no_grad():
        payload = torch.cat([_bytes(tensor) for tensor in bucket])
        dist.broadcast(payload, src=src, group=group)
        if dist.get_rank() == src:
            return
        for tensor, part in zip(bucket, _split(payload, [tensor.nbytes for tensor in bucket]), strict=True):
            # cloned: the part may start at an offset not aligned to its dtype
            tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def broadcast_copies(
    tensors: Mapping[str, torch.Tensor], *, src: int = 0, group: Any = None
) -> dict[str, torch.Tensor]:
    """Return rank ``src``'s values of ``tensors``, in copies.

    A tensor whose shape differs on some rank is left unchanged on all.
    """
    everybody = all_gather_object({name: _describe(tensor) for name, tensor in tensors.items()}, group)
    shared = [
        name
        for name, tensor in tensors.items()
        if tensor.layout is torch.strided and all(other.get(name) == everybody[0].get(name) for other in everybody)
    ]
    copies = {name: tensors[name].detach().clone(memory_format=torch.contiguous_format) for name in shared}
    broadcast_tensors(list(copies.values()), src=src, group=group)
    return {**tensors, **copies}


# -- gradients -----------------------------------------------------------------------------------------------


def average_gradients(parameters: Sequence[nn.Parameter], group: Any = None, *, frozen: bool = False) -> None:
    """Replace each ``.grad`` by its mean over the ranks; one that exists on some rank only counts as zero elsewhere.

    Gradients that are already equal on all ranks stay bitwise equal, so this may follow every backward of an
    accumulation. Sparse gradients stay sparse unless another rank has a dense one for the same parameter. Those of
    frozen parameters are left alone without ``frozen``: one that was frozen since its backward has a gradient, with
    which an optimizer steps.
    """
    averaged = [parameter for parameter in parameters if frozen or parameter.requires_grad]
    if not averaged:
        return
    gradients_there = [
        [parameter.grad is not None and parameter.grad.is_sparse is sparse for parameter in averaged]
        for sparse in (False, True)
    ]
    kinds = torch.tensor(gradients_there, dtype=torch.uint8, device=host(averaged[0].device, group))
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group=group)
    world_size = dist.get_world_size(group)
    dense: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter, is_dense, is_sparse in zip(averaged, *kinds.tolist(), strict=True):
        if is_dense:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            dense.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
        elif is_sparse:
            gradient = _empty_sparse(parameter) if parameter.grad is None else parameter.grad.coalesce()
            dtype = gradient.dtype
            gradient = _summable(gradient)
            dist.all_reduce(gradient, group=group)
            parameter.grad = (gradient / world_size).to(dtype)
    for gradients in dense.values():
        flat = _summable(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        dist.all_reduce(flat, group=group)
        flat /= world_size
        for gradient, part in zip(gradients, _split(flat, [gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _summable(gradient: torch.Tensor) -> torch.Tensor:
    """Return ``gradient`` in a dtype that holds a sum over the ranks where its own holds the mean."""
    return gradient.float() if gradient.dtype is torch.float16 else gradient


def _empty_sparse(parameter: nn.Parameter) -> torch.Tensor:
    """Return a sparse tensor without rows, as an embedding's gradient has them: indices over the first dimension."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=True).coalesce()
