"""Hold the models of one loop as one module, for strategies that set up one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from torchhal.errors import ConfigurationError

STEP_NAMES = ("training_step", "validation_step")
"""The steps by which a strategy runs a function of the user's."""


class Models(nn.Module):
    """Several models, or one with a name, as the parts of one module; what a checkpoint calls them are their names.

    Args:
        models: by name.
        automatic_optimization: True if one of them is trained, so that each backward belongs to one forward of it.
    """

    called_in_parts = True
    """Whether a loop calls the parts one by one, which strategies that wrap modules have to know."""

    def __init__(self, models: Mapping[str, nn.Module], *, automatic_optimization: bool) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)
        self.automatic_optimization = automatic_optimization

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(self._modules) == 1:
            (model,) = self._modules.values()
            assert model is not None
            return model(*args, **kwargs)
        raise NotImplementedError(f"{', '.join(self._modules)} are called one by one")


class FunctionSteps:
    """The steps of a module while a loop of the user's own runs: each is the function that was given last.

    Args:
        module: has ``training_step`` and ``validation_step`` until :meth:`remove`, in the place of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = {name: vars(module)[name] for name in STEP_NAMES if name in vars(module)}
        self.function: Callable[[Any], Any] | None = None
        for name in STEP_NAMES:
            vars(module)[name] = partial(self._step, getattr(module, name, None))

    def _step(self, own: Callable[..., Any] | None, batch: Any, *rest: Any) -> Any:
        if self.function is not None:
            return self.function(batch)
        if own is None:
            raise ConfigurationError("no function is given: call run.forward_backward(function, batch)")
        return own(batch, *rest)

    def remove(self) -> None:
        """Give the module its own steps back."""
        for name in STEP_NAMES:
            vars(self._module).pop(name, None)
        vars(self._module).update(self._own)
        self.function = None
