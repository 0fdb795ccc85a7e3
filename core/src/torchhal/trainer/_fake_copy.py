"""Copy the structure of a model to fake tensors of a device type, for a step that computes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy as shallow_copy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchhal.errors import FakeStepError
from torchhal.trainer.callbacks._meta_copy import HOOKS, ForwardCopy


class FakeCopy(ForwardCopy):
    """A copy of a module whose parameters and buffers are empty tensors on ``device``, made in a FakeTensorMode.

    Ties between parameters stay. Other tensors among the attributes are empty ones where they are, those on the meta
    device on the CPU. Hooks are left out, but torch's own; objects that are no modules, such as a meter of losses, are
    those of the original.

    Args:
        device: of parameters and buffers.
        shapes: of the parameters that have another one in the copy, by the original's id.
    """

    def __init__(self, device: torch.device, shapes: Mapping[int, Sequence[int]]) -> None:
        super().__init__(lambda parameter: torch.Size(shapes.get(id(parameter), parameter.shape)))
        self._device = device
        self.twins: dict[torch.Tensor, torch.Tensor] = {}
        """The copy of each parameter."""

    def module(self, module: nn.Module) -> nn.Module:
        if (made := self._modules.get(id(module))) is not None:
            return made
        registered = {name: getattr(module, name, None) for name in HOOKS}
        new = super().module(module)
        vars(new)["training"] = module.training
        for name, hooks in registered.items():
            vars(new)[name] = OrderedDict((key, hook) for key, hook in (hooks or {}).items() if _is_torchs(hook))
        for name in ("_backward_hooks", "_backward_pre_hooks"):
            vars(new)[name] = OrderedDict()
        return new

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_lazy(tensor):
            raise FakeStepError("parameters have no shape until the first batch")
        if not isinstance(tensor, nn.Parameter):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        shape = self._shape_of(tensor)
        if shape == tensor.shape:
            values = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        else:
            values = torch.empty(shape, dtype=tensor.dtype, device=self._device)
        made = nn.Parameter(values, tensor.requires_grad)
        self.twins[tensor] = made
        return made

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and id(value) not in self._tensors:
            device = torch.device("cpu") if value.is_meta else value.device
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return super()._value(value)


def _is_torchs(hook: Any) -> bool:
    """Return whether ``hook`` is an object of torch's, as those of weight_norm and spectral_norm are."""
    hook = getattr(hook, "hook", hook)
    return type(hook).__module__.startswith("torch.nn.utils.")


def copy_function(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that makes an empty tensor on ``device`` of each tensor of a batch; called in the mode."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise FakeStepError(f"the batch has a tensor of layout {leaf.layout}")
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
        if not callable(getattr(leaf, "to", None)) or isinstance(leaf, type):
            return leaf
        return shallow_copy(leaf).to(device)  # a graph moves itself in place

    return copy
