"""Copy a model's modules without memory: their tensors are fake, on the run's device, with shapes and no values."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchhal.errors import ModelError
from torchhal_parallel._tensor_swap import TensorSwap


class FakeModules:
    """Copies of the modules of ``module``, with fake tensors in the places of parameters and buffers.

    Made while every rank has the whole model.

    Args:
        module: the model.
        around: names of the modules whose own forward is recorded, ``""`` for the outermost; these are not copied.
        device: of the fake tensors.
    """

    def __init__(self, module: nn.Module, around: set[str], device: torch.device) -> None:
        self.module = module
        self.around = around
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self.names = {id(submodule): name for name, submodule in module.named_modules()}
        memo: dict[int, Any] = {id(item): item for item in map(module.get_submodule, around)}
        memo[id(getattr(module, "_trainer", None))] = getattr(module, "_trainer", None)
        for tensor in (*module.parameters(), *module.buffers()):
            memo[id(tensor)] = self._fake(tensor)
        self.attributes: dict[int, str] = {}
        """Names of parameters and buffers, by the ids of their fake tensors."""
        self.swaps: list[TensorSwap] = []
        """The fake tensors, each with the place in the model that it is swapped into."""
        for name, owner in module.named_modules():
            for members in (owner._parameters, owner._buffers):
                for key, tensor in members.items():
                    if tensor is not None:
                        self.swaps.append((members, key, memo[id(tensor)]))
                        self.attributes.setdefault(id(memo[id(tensor)]), f"{name}.{key}" if name else key)
        self.numbers = itertools.count()
        self._leaves: dict[str, Any] = {}
        for name in leaf_modules(module, around):
            try:
                self._leaves[name] = copy.deepcopy(module.get_submodule(name), memo)
            except Exception as error:
                self._leaves[name] = error
        copies = ((submodule, memo.get(id(submodule), submodule)) for submodule in module.modules())
        self.copied = {id(made): submodule for submodule, made in copies if made is not submodule}
        self._copies = [(submodule, memo[id(submodule)]) for submodule in self.copied.values()]

    def sync_training(self) -> None:
        """Put each copy in the mode, training or evaluation, that the original is in now."""
        for submodule, made in self._copies:
            vars(made)["training"] = submodule.training

    def leaf(self, name: str) -> Any:
        """Return the copy without memory of the module ``name``, which may be inside one that is called whole."""
        for outer, made in self._leaves.items():
            if name == outer or name.startswith(f"{outer}."):
                if isinstance(made, Exception):
                    raise ModelError(
                        f"{outer!r} can't be copied to find its shapes ({type(made).__name__}: {made}). A pipeline "
                        "copies the modules that it calls, without memory: keep nothing in their attributes that "
                        "autograd has computed, as torch.nn.utils.weight_norm and torch.nn.utils.prune do. Use "
                        "torch.nn.utils.parametrizations.weight_norm; call prune.remove, or register a parametrization "
                        "(torch.nn.utils.parametrize) that multiplies by a mask; otherwise let the forward compute it"
                    ) from made
                return made if name == outer else made.get_submodule(name[len(outer) + 1 :])
        raise ModelError(f"{name!r} was not part of {type(self.module).__name__} when it was cut into stages")

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made


def modules_around(split_points: Sequence[str]) -> set[str]:
    """Return the names of the modules in which ``split_points`` lie: those whose own forward must be recorded."""
    names = {""}
    for point in split_points:
        parts = point.split(".")
        names.update(".".join(parts[:count]) for count in range(1, len(parts)))
    return names


def leaf_modules(module: nn.Module, around: set[str]) -> Iterator[str]:
    """Return the names of the outermost modules that are not ``around``, in the order of their registration."""

    def walk(owner: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in owner.named_children():
            path = f"{prefix}{name}"
            if path in around:
                yield from walk(child, f"{path}.")
            else:
                yield path

    return walk(module, "")
