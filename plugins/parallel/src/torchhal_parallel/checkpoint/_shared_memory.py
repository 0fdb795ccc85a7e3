"""Find the tensors of a checkpoint that are views of another one, so that their memory is saved once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchhal_parallel.checkpoint._reference import Reference


def shared_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, Reference]:
    """Return name -> reference of each tensor that lies in the memory of another one of the same dtype.

    The other one is contiguous and covers all tensors of its memory; where there is none such, they are saved apart.
    Sharded tensors are, too: their ranks need not share the same ones.
    """
    by_memory: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() and not _is_lazy_view(tensor):
            storage = tensor.untyped_storage()
            by_memory.setdefault((storage.device, storage.data_ptr(), tensor.dtype), []).append(name)
    found: dict[str, Reference] = {}
    for names in by_memory.values():
        if len(names) == 1:
            continue
        begin = min(_begin(tensors[name]) for name in names)
        end = max(_end(tensors[name]) for name in names)
        owner = next((name for name in names if _covers(tensors[name], begin, end)), None)
        if owner is not None:
            found.update((name, _reference(owner, tensors[owner], tensors[name])) for name in names if name != owner)
    return found


def _is_lazy_view(tensor: torch.Tensor) -> bool:
    """Return whether the numbers of its memory are others than its own: those of its conjugate, or the negative."""
    return tensor.is_conj() or tensor.is_neg()


def _begin(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _end(tensor: torch.Tensor) -> int:
    """Return the offset behind the last element of its memory that it reaches."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return _begin(tensor) + sum((size - 1) * stride for size, stride in strides) + 1


def _covers(tensor: torch.Tensor, begin: int, end: int) -> bool:
    return tensor.is_contiguous() and _begin(tensor) == begin and _end(tensor) == end


def _reference(name: str, owner: torch.Tensor, view: torch.Tensor) -> Reference:
    if view.shape == owner.shape and view.stride() == owner.stride():
        return Reference(name)
    return Reference(name, (tuple(view.shape), view.stride(), _begin(view) - _begin(owner)))
