"""Run a step inside the forward of one module, so that the hooks of a wrapper surround the whole step."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from torchhal_parallel._module_restore import ForwardOverride


class StepRunner(nn.Module):
    """The module that a sharded model is called through: it has the module's parameters, and its forward is a step.

    A wrapper hooks the forward of the module that it is applied to. Applied to this one, a step runs inside the hooks
    whether it calls the module itself or only parts of it, and the module's own names stay as they were.

    Outside of a step ``module(...)`` comes here by itself, as from a hook or a callback, or from the training_step of a
    module that optimizes by hand: that one runs its backward passes inside the step, where the outermost hooks would
    not have received an output yet.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.running = False
        RoutedForward(module).runner = self

    def forward(self, step: Any, *args: Any) -> Any:
        before, self.running = self.running, True
        try:
            return step(*args)
        finally:
            self.running = before


class RoutedForward(ForwardOverride):
    """The forward of a module that must run inside the hooks of its :class:`StepRunner`."""

    runner: StepRunner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.runner.running:
            return self.inner(*args, **kwargs)
        return self.runner(functools.partial(self.inner, **kwargs), *args)
