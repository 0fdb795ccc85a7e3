"""Copy the structure of a model to the meta device, and its optimizers, to compute sizes without memory."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchhal.memory_estimate import ModelMemory, model_memory
from torchhal.strategies._optimizer_trials import copy_optimizer, without_step_hooks


def copy_to_meta(module: nn.Module, shape_of: Callable[[nn.Parameter], torch.Size]) -> nn.Module:
    """Return a copy of ``module`` whose parameters and buffers have shapes and no memory.

    Modules and parameters that are used several times are so in the copy. All other attributes are shared with
    ``module``, so nothing else is copied and its forward must not be called. A parameter that has no shape yet is the
    same object.

    Args:
        module: a model.
        shape_of: returns the shape of a parameter, of which a part may lie here.
    """
    return _MetaCopy(shape_of).module(module)


def copy_for_forward(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` on the meta device, in evaluation mode, whose forward leaves ``module`` as it is.

    Besides parameters and buffers, tensors, lists, tuples, dicts and sets among the attributes are copied, and those in
    them; containers of more than 1,000 items and all other objects are shared. Hooks are left out.
    """
    return ForwardCopy(lambda parameter: parameter.shape).module(module)


class _MetaCopy:
    """The modules and tensors that are copied so far, by the originals' ids."""

    def __init__(self, shape_of: Callable[[nn.Parameter], torch.Size]) -> None:
        self._shape_of = shape_of
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) not in self._modules:
            new = self._modules[id(module)] = object.__new__(type(module))
            vars(new).update(vars(module))
            for kind, twin in (("_parameters", self._tensor), ("_buffers", self._tensor), ("_modules", self.module)):
                parts: dict[str, Any] = getattr(module, kind)
                vars(new)[kind] = {name: None if part is None else twin(part) for name, part in parts.items()}
        return self._modules[id(module)]

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = self._on_meta(tensor)
        return self._tensors[id(tensor)]

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_lazy(tensor):
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        values = torch.empty(self._shape_of(tensor), dtype=tensor.dtype, device="meta")
        return nn.Parameter(values, tensor.requires_grad)


HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_LARGEST: Final = 1000


class ForwardCopy(_MetaCopy):
    """Copies what a forward may change."""

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        dynamo = sys.modules.get("torch._dynamo")  # it costs seconds to import, and without it nothing is compiled
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
            return self._modules.setdefault(id(module), _Uncompiled(self.module(module._orig_mod)))
        new = super().module(module)
        attributes = vars(new)
        attributes["_compiled_call_impl"] = None
        for name, value in attributes.items():
            if name in HOOKS:
                attributes[name] = OrderedDict()
            elif name not in ("_parameters", "_buffers", "_modules"):
                attributes[name] = self._value(value)
        attributes["training"] = False
        return new

    def _value(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.module(value.__self__))
        if type(value) not in (list, tuple, dict, set, OrderedDict, defaultdict) or len(value) > _LARGEST:
            return value
        if isinstance(value, dict):
            copied = copy.copy(value)
            copied.update((key, self._value(item)) for key, item in value.items())
            return copied
        return type(value)(map(self._value, value))


class _Uncompiled(nn.Module):
    """Stands for what torch.compile has returned, and calls the module that was compiled."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


def update_copy(on_meta: nn.Module, module: nn.Module) -> None:
    """Give the parameters of a copy the dtypes of those of ``module`` that have their names, and train the same."""
    copies = dict(on_meta.named_parameters())
    for name, parameter in module.named_parameters():
        if name not in copies or is_lazy(copies[name]):
            continue
        if (twin := copies[name]).dtype != parameter.dtype:
            twin.data = torch.empty(twin.shape, dtype=parameter.dtype, device="meta")
        twin.requires_grad_(parameter.requires_grad)


def copy_optimizers(on_meta: nn.Module, module: nn.Module, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return copies of the optimizers of ``module`` that hold the parameters of ``on_meta`` with the same names.

    Raises:
        ValueError: an optimizer holds a tensor that is no parameter of ``module``.
    """
    copies = dict(on_meta.named_parameters())
    twins: dict[torch.Tensor, torch.Tensor] = {
        parameter: copies[name] for name, parameter in module.named_parameters() if name in copies
    }
    made = []
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not all(parameter in twins for parameter in held):
            raise ValueError(f"the {type(optimizer).__name__} holds tensors that are no parameters of the model")
        made.append(copy_optimizer(optimizer, twins))
    return made


def measure(on_meta: nn.Module, optimizers: Sequence[Optimizer]) -> ModelMemory:
    """Return what each parameter of ``on_meta`` needs under these optimizers, which take a step there."""
    with without_step_hooks():
        return model_memory(on_meta, optimizers)
