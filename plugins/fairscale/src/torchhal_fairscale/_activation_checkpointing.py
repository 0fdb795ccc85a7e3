"""Let layers of some classes compute their activations again in backward, with fairscale's ``checkpoint_wrapper``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchhal.errors import ConfigurationError, ModelError
from torchhal_fairscale._autocast import RecordedAutocast
from torchhal_fairscale._replaced_forward import ReplacedForward, has_other_forward


class ActivationCheckpointing:
    """The layers of a model that fairscale checkpoints while it is trained.

    Their ``forward`` is replaced on the layer itself, so the names in a state dict stay; :meth:`disable` takes it away.

    Args:
        classes: a class of layers, or several.
    """

    def __init__(self, classes: Any) -> None:
        several: tuple[Any, ...] = tuple(classes) if isinstance(classes, Iterable) else (classes,)
        for each in several:
            if not (inspect.isclass(each) and issubclass(each, nn.Module)):
                raise ConfigurationError(
                    f"'activation_checkpointing' must be a class of layers or several of them (got {classes!r})"
                )
        self.classes: tuple[type[nn.Module], ...] = several
        self._replaced: list[_CheckpointedForward] = []

    def enable(self, module: nn.Module, alias: str, device_type: str) -> None:
        """Checkpoint the layers of ``module`` that are of :attr:`classes`, the outermost where they are nested.

        Args:
            module: the user's.
            alias: of the strategy.
            device_type: of the devices whose autocast the layers are called in.
        """
        self.disable()
        if not self.classes:
            return
        found = _outermost(module, self.classes)
        if not found:
            names = ", ".join(each.__name__ for each in self.classes)
            raise ModelError(
                f"strategy {alias!r} was given activation_checkpointing={names}, and {type(module).__name__} has no "
                "such layer"
            )
        for layer in found:
            if has_other_forward(layer):
                raise ModelError(
                    f"a {type(layer).__name__} of {type(module).__name__} has a forward of its own on the object, "
                    "which checkpointing would replace: leave its class out of activation_checkpointing"
                )
        for layer in found:
            forward = _CheckpointedForward(layer, device_type)
            forward.put()
            self._replaced.append(forward)

    def disable(self) -> None:
        """Give the layers their own forward back."""
        for forward in self._replaced:
            forward.remove()
        self._replaced = []


class _CheckpointedForward(ReplacedForward):
    """The forward of a layer through fairscale's ``checkpoint_wrapper``, which is called with the autocast of now."""

    def __init__(self, layer: nn.Module, device_type: str) -> None:
        from fairscale.nn import checkpoint_wrapper

        super().__init__(layer)
        self._device_type = device_type
        self._checkpointed = checkpoint_wrapper(_Recomputed(layer))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._checkpointed.forward(RecordedAutocast([self._device_type]), *args, **kwargs)


class _Recomputed(nn.Module):
    """A layer's own forward, as fairscale's checkpoint calls it: without gradients at first, and again in backward.

    fairscale would compute again without autocast on a CPU, and with that of float16 on a GPU whatever was on, and its
    hooks leave batch norms without running statistics when the layer raises. So the autocast comes as an argument, and
    the batch norms of the layer are kept from it by hiding the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._hidden = (layer,)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the layer's, by which fairscale decides whether the output has a gradient."""
        return self._hidden[0].parameters(recurse)

    def forward(self, autocast: RecordedAutocast, /, *args: Any, **kwargs: Any) -> Any:
        from fairscale.nn.checkpoint import is_checkpointing

        layer = self._hidden[0]
        with autocast.entered():
            if not is_checkpointing():  # it is computed again, or without gradients at all
                return type(layer).forward(layer, *args, **kwargs)
            with _without_running_statistics(layer):
                return type(layer).forward(layer, *args, **kwargs)


@contextmanager
def _without_running_statistics(layer: nn.Module) -> Iterator[None]:
    """Let batch norms leave their running statistics alone, which follow a batch when it is computed again."""
    norms = [each for each in layer.modules() if isinstance(each, _BatchNorm)]
    before = [each.track_running_stats for each in norms]
    for each in norms:
        each.track_running_stats = False
    try:
        yield
    finally:
        for each, tracks in zip(norms, before, strict=True):
            each.track_running_stats = tracks


def _outermost(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if not isinstance(child, classes):
            found += _outermost(child, classes)
        elif all(child is not each for each in found):
            found.append(child)
    return found
