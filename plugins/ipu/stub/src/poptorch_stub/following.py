"""A module in training whose host side follows the device: whoever reads its weights gets the device's."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import nn


class OnDevice:
    """A mark on the classes that are made here."""

    executor: ClassVar[Any]
    """A weak reference to the executor that has the values."""

    @classmethod
    def catch_up(cls) -> bool:
        """Bring the values to the host if the device has newer ones; whether it had."""
        executor = cls.executor()
        return bool(executor is not None and executor.copyWeightsToHostIfNeeded())


def _watched(*names: str) -> Any:
    """Return a ``__getattribute__`` that catches up when one of ``names`` is read; without names, whatever is read."""

    def read(self: Any, name: str) -> Any:
        if not names or name in names:
            type.__getattribute__(object.__getattribute__(self, "__class__"), "catch_up")()
        return object.__getattribute__(self, name)

    return read


def follow(module: nn.Module, executor: Any) -> None:
    """Let ``module``, its parameters and its buffers follow ``executor``.

    Raises:
        TypeError: a buffer of another class than Tensor.
    """
    for name, buffer in module.named_buffers():
        if type(buffer) is not torch.Tensor:
            raise TypeError(f"buffer {name!r} must be a torch.Tensor (got a {type(buffer).__name__})")
    reference = {"executor": weakref.ref(executor)}

    def on_use(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.catch_up()
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    parameter_class = type(
        "PoptorchParameter",
        (OnDevice, nn.Parameter),
        {**reference, "__getattribute__": _watched(), "__torch_function__": classmethod(on_use)},
    )
    buffer_class = type(
        "PoptorchBuffer",
        (OnDevice, torch.Tensor),
        {**reference, "__getattribute__": _watched(), "__torch_function__": classmethod(on_use)},
    )
    module_class = type(
        f"Poptorch{type(module).__name__}",
        (OnDevice, type(module)),
        {**reference, "__getattribute__": _watched("_parameters", "_buffers", "forward")},
    )
    module_class.copyWeightsToHostIfNeeded = lambda self: module_class.catch_up()  # type: ignore[attr-defined]
    for parameter in module.parameters():
        parameter.__class__ = parameter_class
    for buffer in module.buffers():
        buffer.__class__ = buffer_class
    module.__class__ = module_class


def leave(module: nn.Module) -> None:
    """Undo :func:`follow`."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    module.__class__ = type(module).__mro__[2]
