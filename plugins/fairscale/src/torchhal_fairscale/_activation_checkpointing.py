"""Let layers of some classes compute their activations again in backward, with fairscale's ``checkpoint_wrapper``."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from torchhal.errors import ConfigurationError, ModelError


class ActivationCheckpointing:
    """The layers of a model that fairscale checkpoints while it is trained.

    ``checkpoint_wrapper`` replaces ``forward`` on the layer itself, so the names in a state dict stay; :meth:`disable`
    takes it away, with the hooks that it registers on batch norms.

    Args:
        classes: a class of layers, or several.
    """

    def __init__(self, classes: Any) -> None:
        several: tuple[Any, ...] = (classes,) if inspect.isclass(classes) else tuple(classes)
        for each in several:
            if not (inspect.isclass(each) and issubclass(each, nn.Module)):
                raise ConfigurationError(
                    f"'activation_checkpointing' must be a class of layers or several of them (got {classes!r})"
                )
        self.classes: tuple[type[nn.Module], ...] = several
        self._wrapped: list[nn.Module] = []
        self._hooks: list[tuple[Any, set[int]]] = []

    def enable(self, module: nn.Module, alias: str) -> None:
        """Checkpoint the layers of ``module`` that are of :attr:`classes`, the outermost where they are nested."""
        self.disable()
        if not self.classes:
            return
        from fairscale.nn import checkpoint_wrapper

        found = _outermost(module, self.classes)
        if not found:
            names = ", ".join(each.__name__ for each in self.classes)
            raise ModelError(
                f"strategy {alias!r} was given activation_checkpointing={names}, and {type(module).__name__} has no "
                "such layer"
            )
        for layer in found:
            if "forward" in vars(layer):
                raise ModelError(
                    f"a {type(layer).__name__} of {type(module).__name__} has a forward of its own on the object, "
                    "which checkpoint_wrapper would replace: leave its class out of activation_checkpointing"
                )
            for each in layer.modules():
                for hooks in (each._forward_pre_hooks, each._forward_hooks):
                    self._hooks.append((hooks, set(hooks)))
            checkpoint_wrapper(layer)
            self._wrapped.append(layer)

    def disable(self) -> None:
        """Give the layers their own forward back."""
        for layer in self._wrapped:
            vars(layer).pop("forward", None)
        for hooks, before in self._hooks:
            for number, hook in list(hooks.items()):
                if number not in before and getattr(hook, "__module__", "").startswith("fairscale."):
                    del hooks[number]
        self._wrapped, self._hooks = [], []


def _outermost(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if not isinstance(child, classes):
            found += _outermost(child, classes)
        elif all(child is not each for each in found):
            found.append(child)
    return found
