"""Small views of large memory: saved as the part they use, still shared with the other views of it.

torch.save writes the whole storage under a tensor. So the first row of a matrix costs the matrix. Here each
stretch of a storage that some tensor of the checkpoint covers becomes a separate storage, without a copy, and
tensors that overlap stay in one: after a load a write through one still changes the other. Only a single tensor
that covers less than half of its stretch (a column) is copied.

A storage is left as it is when less than a tenth of it, or less than a page, would be saved.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch

_PAGE = 4096
_ALIGNMENT = 16  # bytes: a stretch starts where a number of any dtype may


class StorageCompactor:
    """The tensors of one checkpoint, by the memory they view."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        self._whole: set[tuple[torch.device, int]] = set()

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            for part in _parts(tensor):
                self.keep(part)
            return
        try:
            storage = tensor.untyped_storage()
            key = (storage.device, storage.data_ptr())
            unused = storage.nbytes() - tensor.numel() * tensor.element_size()
        except (RuntimeError, NotImplementedError):  # a device without such memory
            return
        if unused < _PAGE or tensor.__dict__ or tensor.is_conj() or tensor.is_neg() or not key[1]:
            self._whole.add(key)
        else:
            self._tensors.setdefault(key, []).append(tensor)

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Leave ``storage`` as it is: it is referenced by an object that can't be replaced."""
        try:
            self._whole.add((storage.device, storage.data_ptr()))
        except (RuntimeError, NotImplementedError):
            pass

    def replacements(self) -> dict[int, torch.Tensor]:
        replaced: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for key, tensors in self._tensors.items():
                if key not in self._whole:
                    replaced.update(_replace(tensors))
        return replaced


def pickle_module(replaced: dict[int, torch.Tensor]) -> Any:
    """Return a module for torch.save that pickles each tensor of ``replaced`` as the one given for it."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            other = replaced.get(id(obj))
            return NotImplemented if other is None else other.__reduce_ex__(2)  # type: ignore[no-untyped-call]

    return SimpleNamespace(Pickler=Pickler, __name__="pickle")


def _replace(tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    storage = tensors[0].untyped_storage()
    stretches: list[tuple[int, int, list[torch.Tensor]]] = []
    for start, end, tensor in sorted(((*_reach(tensor), tensor) for tensor in tensors), key=lambda reach: reach[:2]):
        if stretches and start < stretches[-1][1]:
            first, last, sharing = stretches[-1]
            stretches[-1] = (first, max(last, end), [*sharing, tensor])
        else:
            stretches.append((start, end, [tensor]))
    dense = {
        id(sharing[0]) for start, end, sharing in stretches if len(sharing) == 1 and _is_sparse(sharing[0], end - start)
    }
    used = sum(_bytes(s[0]) if id(s[0]) in dense else end - start for start, end, s in stretches)
    if storage.nbytes() - used < max(_PAGE, storage.nbytes() // 10):
        return {}
    replaced = {}
    for start, end, sharing in stretches:
        part = storage[start:end]  # the same memory
        for tensor in sharing:
            if id(tensor) in dense:
                other = tensor.detach().clone(memory_format=torch.contiguous_format)
            else:
                offset = tensor.storage_offset() - start // tensor.element_size()
                other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                other.set_(part, offset, tensor.size(), tensor.stride())
            if isinstance(tensor, torch.nn.Parameter):
                other = torch.nn.Parameter(other, tensor.requires_grad)
            replaced[id(tensor)] = other.requires_grad_(tensor.requires_grad)
    return replaced


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_sparse(tensor: torch.Tensor, reach: int) -> bool:
    return reach - 2 * _bytes(tensor) >= _PAGE


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of the tensor's storage from the first to behind the last element, the start rounded down."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end: int = start + (last + 1) * size if tensor.numel() else start
    return start - start % _ALIGNMENT, end


def _parts(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor that is made of others."""
    found: list[torch.UntypedStorage] = []

    class Finder(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, torch.storage.TypedStorage):
                found.append(obj._untyped_storage)
                return "storage"
            return None

    class Nowhere:
        def write(self, data: Any) -> int:
            return len(data)

    Finder(Nowhere(), protocol=2).dump(tensor)
    return found
