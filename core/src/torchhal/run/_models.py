"""Hold the models of one loop as one module, for strategies that set up one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

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
    """The steps of a module while a strategy runs a function of the user's: each is that function.

    Args:
        module: has ``training_step`` and ``validation_step`` inside of :meth:`running`, in the place of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = {name: getattr(module, name, None) for name in STEP_NAMES}
        self._function: Callable[[Any], Any] | None = None

    def _step(self, name: str, batch: Any, *rest: Any) -> Any:
        function, self._function = self._function, None
        if function is None:  # which calls the module's own
            return self._own[name](batch, *rest)  # type: ignore[misc]
        try:
            return function(batch)
        finally:
            self._function = function

    @contextmanager
    def running(self, function: Callable[[Any], Any]) -> Iterator[None]:
        """Return a context in which the module's steps are ``function``, of the batch alone."""
        attributes = vars(self._module)
        own = {name: attributes[name] for name in STEP_NAMES if name in attributes}
        self._function = function
        attributes.update({name: partial(self._step, name) for name in STEP_NAMES})
        try:
            yield
        finally:
            self._function = None
            for name in STEP_NAMES:
                attributes.pop(name, None)
            attributes.update(own)
