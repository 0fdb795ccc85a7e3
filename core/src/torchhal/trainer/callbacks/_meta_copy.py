"""Copy the structure of a model to the meta device, and its optimizers, to compute sizes without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in modules:
            new = modules[id(part)] = object.__new__(type(part))
            vars(new).update(vars(part))
            for kind, copy_one in (("_parameters", tensor_on_meta), ("_buffers", tensor_on_meta), ("_modules", copied)):
                own = {name: None if one is None else copy_one(one) for name, one in getattr(part, kind).items()}
                vars(new)[kind] = own
        return modules[id(part)]

    def tensor_on_meta(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in tensors:
            if isinstance(tensor, nn.Parameter):
                tensors[id(tensor)] = (
                    tensor
                    if is_lazy(tensor)
                    else nn.Parameter(
                        torch.empty(shape_of(tensor), dtype=tensor.dtype, device="meta"), tensor.requires_grad
                    )
                )
            else:
                tensors[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return tensors[id(tensor)]

    return copied(module)


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
