"""Replace the forward of a layer while a run lasts, and not in copies that are made of the model meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class ReplacedForward:
    """A forward on the object of a layer; a subclass says in ``__call__`` what it does.

    A layer that is copied or pickled in the run, as an average of weights and a checkpoint callback do, has the forward
    of its class there: the copy is no part of the run.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def put(self) -> None:
        """Let the layer use this forward."""
        vars(self.layer)["forward"] = self

    def remove(self) -> None:
        """Let the layer use the forward of its class again, if nobody has put another one in between."""
        if vars(self.layer).get("forward") is self:
            del vars(self.layer)["forward"]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        return _of_class, (self.layer,)


def _of_class(layer: nn.Module) -> MethodType:
    return MethodType(type(layer).forward, layer)


def has_other_forward(layer: nn.Module) -> bool:
    """Return whether the layer has a forward that isn't that of its class; a copy made in a run has that on itself."""
    own = vars(layer).get("forward")
    return own is not None and not (isinstance(own, MethodType) and own == _of_class(layer))
