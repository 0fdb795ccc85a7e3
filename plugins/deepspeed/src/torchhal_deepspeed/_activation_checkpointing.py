"""Compute the activations of chosen submodules again in backward, instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from torchhal.errors import ConfigurationError


def recompute(module: nn.Module, which: Any) -> Callable[[], None]:
    """Run the chosen submodules' forward under ``torch.utils.checkpoint`` from now on; return what undoes it.

    Args:
        module: the model; itself never chosen.
        which: see :func:`chooser`. Submodules inside a chosen one are part of it.

    Raises:
        ConfigurationError: ``which`` is of another form, or chooses nothing.
    """
    wanted = chooser(which)
    chosen = [(name, submodule) for name, submodule in module.named_modules() if name and wanted(name, submodule)]
    names = {name for name, _ in chosen}
    outermost = [submodule for name, submodule in chosen if not any(name.startswith(f"{other}.") for other in names)]
    if not outermost:
        raise ConfigurationError(
            f"'activation_checkpointing' chooses no submodule of {type(module).__name__} ({which!r})"
        )
    undo = [_wrapped(submodule) for submodule in outermost]

    def restore() -> None:
        for one in undo:
            one()

    return restore


def chooser(which: Any) -> Callable[[str, nn.Module], bool]:
    """Return a function of a submodule's name and the submodule that is True where it is chosen.

    Args:
        which: classes of submodules, or a callable of a name and a submodule.

    Raises:
        ConfigurationError: it is neither.
    """
    given = (which,) if isinstance(which, type) else which
    if isinstance(given, Iterable) and not isinstance(given, str):
        classes = tuple(given)
        if classes and all(isinstance(item, type) and issubclass(item, nn.Module) for item in classes):
            return lambda name, submodule: isinstance(submodule, classes)
    elif callable(which):
        return lambda name, submodule: bool(which(name, submodule))
    raise ConfigurationError(
        "'activation_checkpointing' must be classes of submodules, or a callable of a name and a submodule "
        f"(got {which!r})"
    )


def _wrapped(submodule: nn.Module) -> Callable[[], None]:
    attributes = vars(submodule)
    before = attributes.get("forward")
    attributes["forward"] = functools.partial(checkpoint, submodule.forward, use_reentrant=False)

    def undo() -> None:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before

    return undo
