"""Memory and values for a model, or a unit of it, that lies on the meta device on some ranks or on all.

``configure_model`` runs as it is written on rank 0, in host memory, and on the meta device elsewhere: all ranks
get rank 0's values, and every other rank holds no more than one unit whole beside its shares. A model too
large for rank 0's host as well is built ``with torch.device("meta")``, as for torchtitan: there nothing of what
``__init__`` does to values survives, and they come from

1. ``reset_parameters()`` of each module that holds such parameters or buffers, as torch's own modules have it;
2. ``_init_weights(module)`` of a module around it, which initializes what it contains, as models of Hugging Face do;
3. ``init_weights()`` of the outermost modules that have it, as models of torchtitan, timm and mmengine do.

What none of them sets is an error, by name. They are called for each unit, while everything that is not to be set now
is on the meta device, where what they write has no effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchhal.errors import ModelError
from torchhal_parallel._tensor_swap import TensorSwap, swapped_tensors


def tensors_on_meta(module: nn.Module) -> list[str]:
    """Return names of the parameters and buffers of ``module`` that have no memory; every name of a tied one."""
    named = (
        *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    )  # fmt: skip
    return [name for name, tensor in named if tensor.is_meta]


def materialize(model: nn.Module, unit: nn.Module, unset: Collection[str], device: torch.device) -> list[torch.Tensor]:
    """Give what ``unit`` holds, and no inner unit has divided yet, memory on ``device``.

    Args:
        model: the whole model, in which ``unit`` is; what is divided or on the meta device elsewhere stays so.
        unit: a submodule of ``model``, or a module around it.
        unset: names in ``model`` of the tensors that rank 0 has no values for.
        device: where to.

    Returns:
        Its distinct parameters and buffers, in the same order on every rank. Those in ``unset`` have values now, the
        others have them where they had before.

    Raises:
        ModelError: a tensor of ``unset`` has been given no values.
    """
    made: dict[int, torch.Tensor] = {}
    places: set[tuple[int, str]] = set()
    for owner, name, tensor in _held(unit):
        if id(tensor) not in made:
            made[id(tensor)] = _on(tensor, device)
        setattr(owner, name, made[id(tensor)])  # not in its dict: an LSTM keeps a list of its own
        places.add((id(owner), name))
    waiting = {name: model.get_submodule(name.rpartition(".")[0]) for name in unset}
    waiting = {name: owner for name, owner in waiting.items() if (id(owner), name.rpartition(".")[2]) in places}
    if waiting:
        _initialize(model, waiting, device)
        values = {name: getattr(owner, name.rpartition(".")[2]) for name, owner in waiting.items()}
        if empty := [name for name, value in values.items() if _is_empty(value)]:
            raise ModelError(
                f"{', '.join(map(repr, empty[:4]))}{' and others' if len(empty) > 4 else ''} of {type(model).__name__} "
                "were built on the meta device, and nobody has given them values: set them in reset_parameters() of "
                f"their module, {type(waiting[empty[0]]).__name__}, or in init_weights() of the model; or build the "
                "model in configure_model without torch.device('meta')"
            )
    return list({id(tensor): tensor for _, _, tensor in _held(unit)}.values())


def _initialize(model: nn.Module, waiting: Mapping[str, nn.Module], device: torch.device) -> None:
    owners: dict[int, Any] = {id(owner): owner for owner in waiting.values()}
    places = {(id(owner), name.rpartition(".")[2]) for name, owner in waiting.items()}
    with torch.no_grad(), torch.device(device), swapped_tensors(_outlines(model, places)):
        for owner in owners.values():
            if callable(getattr(owner, "reset_parameters", None)):
                owner.reset_parameters()
        for around in model.modules():
            initialize = getattr(around, "_init_weights", None)
            if callable(initialize) and _takes(initialize, 1):
                for module in around.modules():
                    if id(module) in owners:
                        initialize(module)
        for root in _outermost(model):
            root.init_weights()


def _outermost(module: nn.Module) -> Iterator[Any]:
    """Yield the modules with an ``init_weights()`` that no other such module contains."""
    initialize = getattr(module, "init_weights", None)
    if callable(initialize) and _takes(initialize, 0):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _outlines(model: nn.Module, places: Collection[tuple[int, str]]) -> list[TensorSwap]:
    """For all that is not in ``places`` one on the meta device: it is divided, has values, or gets them later."""
    made: dict[int, torch.Tensor] = {}
    found: list[TensorSwap] = []
    for owner in model.modules():
        for members in (owner._parameters, owner._buffers):
            for name, tensor in members.items():
                if tensor is None or (id(owner), name) in places:
                    continue
                outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                if isinstance(tensor, nn.Parameter):
                    outline = nn.Parameter(outline, requires_grad=tensor.requires_grad)
                found.append((members, name, made.setdefault(id(tensor), outline)))
    return found


def _held(unit: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in unit.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and not isinstance(tensor, DTensor):
                yield owner, name, tensor


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    moved = _filled(tensor, device) if tensor.is_meta else tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved


def _filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of the shape of ``tensor``, with what no initialisation leaves there."""
    empty = torch.empty_like(tensor, device=device)
    if tensor.dtype != torch.bool:
        whole = tensor.is_floating_point() or tensor.is_complex()
        empty.fill_(float("nan") if whole else torch.iinfo(tensor.dtype).min)
    return empty


def _is_empty(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has an element of :func:`_filled`; always False for an unsigned or boolean one."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.detach().isnan().any())
    if tensor.dtype == torch.bool or not torch.iinfo(tensor.dtype).min:
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())
