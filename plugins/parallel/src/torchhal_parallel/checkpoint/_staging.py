"""Copy a checkpoint to host memory, which blocks the step; the copy is written afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

_ALIGNMENT = 16  # bytes: a piece of memory starts where a number of any dtype may

_Shared = list[tuple[torch.Tensor, torch.Tensor]]  # (tensor of the checkpoint, the plain one that holds its numbers)


class HostMemory:
    """Memory that one snapshot after the other is taken into.

    The first touch of new memory takes longer than the copy.

    It holds what the last snapshot needed. A snapshot overwrites the one before.
    """

    def __init__(self) -> None:
        self._used: dict[int, list[torch.Tensor]] = {}
        self._free: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        self._used, self._free = {}, self._used

    def end(self) -> None:
        """Release what the snapshot had no use for."""
        self._free = {}

    def take(self, count: int) -> torch.Tensor:
        """Return ``count`` bytes, shape (count,)."""
        free = self._free.get(count)
        piece = free.pop() if free else torch.empty(count, dtype=torch.uint8)
        self._used.setdefault(count, []).append(piece)
        return piece


def snapshot(checkpoint: dict[str, Any], memory: HostMemory | None = None) -> dict[str, Any]:
    """Return ``checkpoint`` with all tensors copied to host memory, and everything else copied too.

    Tensors that share memory share the copy's. Of a sharded tensor this rank's part is copied; the copy is laid out
    as the tensor is, so that it can be saved in its place. Tensors on the meta device stay what they are.
    """
    memory = memory or HostMemory()
    memory.begin()
    try:
        return _snapshot(checkpoint, memory)
    finally:
        memory.end()


def _snapshot(checkpoint: dict[str, Any], host: HostMemory) -> dict[str, Any]:
    memo: dict[int, Any] = {}
    by_memory: dict[tuple[torch.device, int], _Shared] = {}
    with torch.no_grad():
        for tensor in _tensors(checkpoint):
            if is_lazy(tensor) or tensor.is_meta:
                memo[id(tensor)] = tensor
                continue
            plain = tensor.detach()
            if isinstance(plain, DTensor):
                plain = plain.to_local()
            if (key := _memory_of(plain)) is None:
                memo[id(tensor)] = _dressed(tensor, plain.to("cpu", copy=True))
            else:
                by_memory.setdefault(key, []).append((tensor, plain))
        for shared in by_memory.values():
            for tensor, part in _copied(shared, host):
                memo[id(tensor)] = _dressed(tensor, part)
        for tensor in _tensors(checkpoint):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.__dict__ and not tensor.is_meta:
                memo[id(tensor)].__dict__.update(copy.deepcopy(tensor.__dict__, memo))
        copied: dict[str, Any] = copy.deepcopy(checkpoint, memo)
    return copied


def _tensors(checkpoint: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of containers, each once."""
    seen: set[int] = set()
    stack = [checkpoint]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield value
            if type(value) in (torch.Tensor, torch.nn.Parameter) and value.__dict__:
                stack.extend(value.__dict__.values())
        elif isinstance(value, Mapping):
            seen.add(id(value))
            stack.extend(value.values())
            stack.extend(getattr(value, "__dict__", {}).values())  # an OrderedDict's _metadata
        elif isinstance(value, list | tuple | set):
            seen.add(id(value))
            stack.extend(value)


def _memory_of(plain: torch.Tensor) -> tuple[torch.device, int] | None:
    """Return what tensors that share memory have in common; None for one that is copied by itself."""
    if type(plain) is not torch.Tensor or plain.layout is not torch.strided or plain.is_quantized or plain.is_nested:
        return None
    try:
        storage = plain.untyped_storage()
        return (storage.device, storage.data_ptr()) if plain.numel() and storage.data_ptr() else None
    except (RuntimeError, NotImplementedError):  # a device without such memory
        return None


def _copied(shared: _Shared, host: HostMemory) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of one memory with its copy on the CPU; those that overlap lie in one copy, as before."""
    if len(shared) == 1 and _reach(shared[0][1])[1] - _reach(shared[0][1])[0] > 2 * _bytes(shared[0][1]):
        tensor, plain = shared[0]  # such as a column: not all that lies between its numbers
        yield tensor, plain.to("cpu", memory_format=torch.contiguous_format, copy=True)
        return
    storage = max((plain.untyped_storage() for _, plain in shared), key=lambda storage: int(storage.nbytes()))
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    pieces: list[tuple[int, int, _Shared]] = []
    for start, end, pair in sorted(((*_reach(pair[1]), pair) for pair in shared), key=lambda reach: reach[:2]):
        if pieces and start < pieces[-1][1]:
            first, last, sharing = pieces[-1]
            pieces[-1] = (first, max(last, end), [*sharing, pair])
        else:
            pieces.append((start, end, [pair]))
    for start, end, sharing in pieces:
        piece = host.take(end - start).copy_(memory[start:end]).untyped_storage()
        for tensor, plain in sharing:
            part = torch.empty(0, dtype=plain.dtype)
            part.set_(piece, plain.storage_offset() - start // plain.element_size(), plain.size(), plain.stride())
            if plain.is_conj():
                part = part.conj()
            yield tensor, torch._neg_view(part) if plain.is_neg() else part


def _dressed(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return ``part`` as what ``tensor`` is: a parameter, a sharded tensor."""
    if isinstance(tensor, DTensor):
        sharded: torch.Tensor = DTensor(part, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return sharded
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(part, tensor.requires_grad)
    return part.requires_grad_(tensor.requires_grad)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes, in its memory, from the first to behind the last element, the start rounded down."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start - start % _ALIGNMENT, start + (last + 1) * size
