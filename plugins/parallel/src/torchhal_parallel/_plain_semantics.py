"""Let divided tensors do what plain ones do, or raise, where torch's DTensor gives other results without an error.

``.item()``, ``float()``, ``int()`` and ``bool()`` give the number that stands in this rank's memory: of a norm of a
sharded gradient that of this rank's part. ``weight.data = value`` changes nothing. ``weight[0]``, a view of a plain
tensor, is gathered where it is divided, so that what is written to it is lost. Operators between tensors are correct or
raise, and ``.tolist()`` and ``.numpy()`` raise. Random numbers (``weight.normal_()``, ``randn_like(gradient)``)
are drawn for each part from generators that are alike, so that the parts are equal.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from torchhal.errors import ModelError
from torchhal_parallel._dtensor_layout import full_tensor, shard_like, to_local
from torchhal_parallel._random_operators import DROPOUT, drawing, is_by_shape
from torchhal_parallel._remote_tensor import written

if not hasattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers"):
    raise ImportError(
        f"torch {torch.__version__} has no DTensor._op_dispatcher._custom_op_handlers, without which .item() of a "
        "divided tensor would be the number of one rank's part: use another torch, or another torchhal-parallel"
    )

_aten = torch.ops.aten
_NUMBER = _aten._local_scalar_dense.default
_VIEWS = (
    _aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.diagonal.default,
)  # fmt: skip
"""Operators by which one writes to some elements of a tensor, and that gather a divided one."""

_WHAT = "the number (.item(), float(), int() or bool()) of a divided tensor, which all ranks must ask for"

_lock = threading.Lock()
_enabled: list[PlainSemantics] = []
_before: dict[Any, Any] = {}
_gathered: dict[int, tuple[StorageWeakRef, StorageWeakRef]] = {}
"""The memory of what was gathered for a view and is still there, and that of what it was gathered from."""
_watching: list[Callable[[Any, Any, Any], None]] = []
"""What is called with an operator, and its arguments, that writes to a divided tensor."""


class PlainSemantics:
    """While enabled, a number is gathered from all ranks that have a part of its tensor, which must all read it.

    ``.data`` can be assigned to, and a write to a view that would be lost raises ModelError. Random numbers are drawn
    for the whole tensor by each rank, which keeps those of its part: ranks that are seeded alike have together what one
    process draws, and their generators stay alike. Values that they depend on (``bernoulli(weight)``) are gathered;
    dropout draws a mask, and gathers nothing.

    Args:
        guard: makes a context, given what is done in it, in which the ranks communicate.
        parameters: gives those of the model.
    """

    def __init__(
        self,
        guard: Callable[[str], AbstractContextManager[None]],
        parameters: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self.guard = guard
        self.parameters = parameters

    def enable(self) -> None:
        with _lock:
            if self not in _enabled:
                _enabled.append(self)
            if len(_enabled) == 1 and not _before:
                _handle({_NUMBER: _number_of_whole, **dict.fromkeys(_VIEWS, _view), **dict.fromkeys(drawing(), _draw)})
                DTensor.data = property(torch.Tensor.data.__get__, _assign)  # type: ignore[assignment,attr-defined]

    def disable(self) -> None:
        """Let torch do what it does by itself, if no other run needs this one. Idempotent."""
        with _lock:
            if self in _enabled:
                _enabled.remove(self)
                if not _enabled:
                    _unhandle(list(_before))
                    _gathered.clear()
                    del DTensor.data


def _handlers() -> dict[Any, Any]:
    """Return the handlers that torch has of operators on DTensors; it may put another dict in the place of this one."""
    return DTensor._op_dispatcher._custom_op_handlers


def _handle(handlers: dict[Any, Any]) -> None:
    present = _handlers()
    for operator, handler in handlers.items():
        _before.setdefault(operator, present.get(operator))
        present[operator] = handler


def _unhandle(operators: Any) -> None:
    present = _handlers()
    for operator in operators:
        present.pop(operator, None)
        if (before := _before.pop(operator, None)) is not None:
            present[operator] = before


def _by_torch(operator: Any, args: Any, kwargs: Any, *, instead: Callable[..., Any]) -> Any:
    """Return what torch itself computes; ``instead`` is what handles the operator otherwise."""
    handlers = _handlers()
    handlers.pop(operator, None)
    if (before := _before.get(operator)) is not None:
        handlers[operator] = before
    try:
        return operator(*args, **kwargs)
    finally:
        if operator in _before:
            handlers[operator] = instead


def _number_of_whole(operator: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0].detach()
    if all(placement.is_replicate() for placement in tensor.placements):
        return operator(tensor.to_local())
    with _enabled[-1].guard(_WHAT):
        return operator(full_tensor(tensor))


def _draw(operator: Any, args: Any, kwargs: Any) -> Any:
    targets = [tensor for tensor in written(operator, args, kwargs) if isinstance(tensor, DTensor)]
    if any(placement.is_partial() for target in targets for placement in target.placements):
        return _by_torch(operator, args, kwargs, instead=_draw)  # what stands in the ranks is a sum's
    if targets:
        _check_written(operator, args, kwargs)
    if operator is DROPOUT:
        return _drop(*args, **kwargs)
    take = _empty_whole if is_by_shape(operator) else _values_of_whole
    made: dict[int, torch.Tensor] = {}  # a tensor that is given twice is one

    def whole_of(tensor: DTensor) -> torch.Tensor:
        return made.setdefault(id(tensor), take(tensor))

    drawn = operator(*tree_map_only(DTensor, whole_of, args), **tree_map_only(DTensor, whole_of, kwargs))
    for target in targets:
        target._local_tensor.copy_(to_local(shard_like(made[id(target)], target)))
    source = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    results = drawn if isinstance(drawn, tuple) else (drawn,)
    written_to = iter(targets)
    results = tuple(
        _divided_as(each, source) if returned.alias_info is None else next(written_to)
        for each, returned in zip(results, operator._schema.returns, strict=True)
    )
    return results if isinstance(drawn, tuple) else results[0]


def _drop(source: DTensor, p: float, train: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    ones = _empty_whole(source).fill_(1)
    factors, mask = (_divided_as(each, source) for each in DROPOUT(ones, p, train))
    return source * factors, mask


def _empty_whole(tensor: DTensor) -> torch.Tensor:
    device = tensor._local_tensor.device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _values_of_whole(tensor: DTensor) -> torch.Tensor:
    if all(placement.is_replicate() for placement in tensor.placements):
        return tensor._local_tensor.clone()  # it may be written to
    with _enabled[-1].guard("random numbers that are drawn by the values of a divided tensor"):
        return full_tensor(tensor)


def _divided_as(tensor: torch.Tensor, source: DTensor) -> torch.Tensor:
    """Return ``tensor``, whole on every rank, divided as ``source`` is where it has its shape."""
    if tensor.shape == source.shape and not any(placement.is_partial() for placement in source.placements):
        return shard_like(tensor, source)
    mesh = source.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _view(operator: Any, args: Any, kwargs: Any) -> Any:
    result = _by_torch(operator, args, kwargs, instead=_view)
    source = args[0]
    if isinstance(source, DTensor) and source.grad_fn is None:  # what has one is an activation
        own = source._local_tensor.untyped_storage()
        for view in tree_leaves(result):
            storage = view._local_tensor.untyped_storage()
            if storage._cdata != own._cdata:
                _handle_writes()
                references = StorageWeakRef(storage), StorageWeakRef(own)  # type: ignore[no-untyped-call]
                _gathered[references[0].cdata] = references
    return result


@contextmanager
def watched_writes(check: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Call ``check`` with each operator, and its arguments, that writes to a divided tensor inside; some 50 us."""
    handlers = _handlers()
    outside = None if _gathered else (dict(handlers), dict(_before))
    _handle_writes()
    count = len(handlers)
    _watching.append(check)
    try:
        yield
    finally:
        _watching.remove(check)
        if outside is not None and not _gathered and not _watching and _handlers() is handlers:
            if len(handlers) != count:  # loss_parallel, entered or left inside, has its own there
                _follow_others(outside[0], handlers)
            for present, before in zip((handlers, _before), outside, strict=True):
                present.clear()
                present.update(before)


def _follow_others(kept: dict[Any, Any], handlers: dict[Any, Any]) -> None:
    """Add to ``kept`` what others have put into ``handlers`` since, and take out what they have taken out."""
    writes = _write_handlers()
    for operator in [operator for operator in kept if operator not in handlers]:
        del kept[operator]
    kept.update((operator, handler) for operator, handler in handlers.items() if operator not in writes)


def _handle_writes() -> None:
    writes = _write_handlers()
    if next(iter(writes)) in _before:
        return
    present = _handlers()
    own = [(operator, handler) for operator, handler in present.items() if operator in writes]
    _before.update(_unhandled())  # by dicts as a whole: an operator's hash is a function in Python
    _before.update(own)
    present.update(writes)


@functools.cache
def _write_handlers() -> dict[Any, Any]:
    return dict.fromkeys(_writing(), _write)


@functools.cache
def _unhandled() -> dict[Any, Any]:
    return dict.fromkeys(_writing())


def _check_written(operator: Any, args: Any, kwargs: Any) -> None:
    for check in _watching:
        check(operator, args, kwargs)
    if _gathered:
        _check_views(operator, args, kwargs)


def _write(operator: Any, args: Any, kwargs: Any) -> Any:
    _check_written(operator, args, kwargs)
    result = _by_torch(operator, args, kwargs, instead=_write)
    if not _gathered and not _watching:
        _unhandle(_writing() & _before.keys())
    return result


def _check_views(operator: Any, args: Any, kwargs: Any) -> None:
    for key in [key for key, (view, _) in _gathered.items() if view.expired()]:  # type: ignore[no-untyped-call]
        del _gathered[key]
    for tensor in written(operator, args, kwargs):
        if isinstance(tensor, DTensor):
            found = _gathered.get(tensor._local_tensor.untyped_storage()._cdata)
            if found is not None and _is_kept(found[1]):
                raise ModelError(
                    f"{operator.name()} writes to a view of a parameter or gradient, as weight[0].zero_() and "
                    f"weight[0] = 1 do. Its elements, of the shape {tuple(tensor.shape)}, were gathered from several "
                    "ranks, of which each has a part, and the write would be lost: write the whole back, as by "
                    "weight.data = weight.full_tensor() * mask, or use strategy='ddp' or 'zero1'"
                )


def _is_kept(memory: StorageWeakRef) -> bool:
    """Return whether ``memory`` is of a parameter or gradient; activations have no ``grad_fn`` under ``no_grad``."""
    return any(
        isinstance(tensor, DTensor) and tensor._local_tensor.untyped_storage()._cdata == memory.cdata
        for semantics in _enabled
        for parameter in semantics.parameters()
        for tensor in (parameter, parameter.grad)
    )


@functools.cache
def _writing() -> frozenset[Any]:
    """Return the operators that write to an argument, by ``out=`` too, but for those of random numbers."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or not any(each.alias_info and each.alias_info.is_write for each in schema.arguments):
            continue
        if operator := getattr(getattr(_aten, name, None), schema.overload_name or "default", None):
            found.add(operator)
    return frozenset(found - drawing())


def _assign(tensor: DTensor, value: Any) -> None:
    """Assign ``tensor.data = value``."""
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ModelError(
            f"a parameter or gradient of {tuple(tensor.shape)} elements of {tensor.dtype}, of which each rank has a "
            f"part, can't take .data of {tuple(value.shape)} elements of {value.dtype}: replace it before fit"
        )
    new: Any = value.detach()
    with torch.no_grad():
        if isinstance(new, DTensor):
            new = new.redistribute(tensor.device_mesh, tensor.placements)
        else:
            new = shard_like(new, tensor.detach())
        tensor._local_tensor.copy_(to_local(new))
