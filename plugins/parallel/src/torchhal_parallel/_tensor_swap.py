"""Other tensors in the places of a module's own, for the time of one part of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

TensorSwap = tuple[dict[str, Any], str, torch.Tensor]
"""A submodule's parameters or buffers, the name there, and the tensor to stand in."""


def buffer_copies(module: nn.Module, device: torch.device) -> list[TensorSwap]:
    """Return a copy of each buffer on ``device``; buffers that are one tensor stay one.

    Also where they lie there already: a step writes to its buffers in place, and what autograd has kept of another
    part must stay as it was.
    """
    made: dict[int, torch.Tensor] = {}
    copies = []
    for members, name, buffer in _members(module, "_buffers"):
        if id(buffer) not in made:
            made[id(buffer)] = buffer.detach().to(device, copy=True)
        copies.append((members, name, made[id(buffer)]))
    return copies


def parameter_copies(module: nn.Module, device: torch.device) -> list[TensorSwap]:
    """Return each parameter on ``device``, by copies through which gradients come back to it; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}
    copies = []
    for members, name, parameter in _members(module, "_parameters"):
        if parameter.device == device:
            continue
        if id(parameter) not in made:
            made[id(parameter)] = parameter.to(device, non_blocking=True)
        copies.append((members, name, made[id(parameter)]))
    return copies


@contextmanager
def swapped_tensors(copies: Sequence[TensorSwap]) -> Iterator[None]:
    """While entered, the module has ``copies``; changes of them are discarded afterwards.

    They are replaced in the dicts themselves: a module refuses to register a tensor with a history as a parameter, and
    nothing that refers to a submodule, such as a list or a hook, has to be updated.
    """
    own = [members[name] for members, name, _ in copies]
    try:
        for members, name, tensor in copies:
            members[name] = tensor
        yield
    finally:
        for (members, name, _), tensor in zip(copies, own, strict=True):
            members[name] = tensor


def _members(module: nn.Module, kind: str) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for owner in module.modules():
        members = owner.__dict__[kind]
        for name, tensor in members.items():
            if tensor is not None and not is_lazy(tensor):
                yield members, name, tensor
