"""Wrap the user's module in one whose forward is a whole step, for the engine to wrap."""

from __future__ import annotations

from typing import Any

from torch import nn


class StepModule(nn.Module):
    """A module with the submodules, parameters and buffers of ``module``, whose forward is a whole step.

    The engine hooks the forward of the module that it wraps. Applied to the twin, one step is one forward, whether it
    calls the user's module itself, once or several times, or only parts of it. The names in the engine's own files
    are the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["module"] = module  # no submodule: its parameters would be registered twice
        super().__init__()
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set

    def forward(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    @property
    def training(self) -> bool:
        return bool(self.__dict__["module"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore the mode that nn.Module sets when it is made: the user's module keeps it."""
