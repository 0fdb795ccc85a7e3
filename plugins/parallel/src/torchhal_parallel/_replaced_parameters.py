"""Refuse a parameter that is put in another's place while a model trains whose parameters the ranks divide."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchhal.errors import ModelError

_OF_SHARDING = "torch.distributed"


class ReplacedParameters:
    """From its making to :meth:`stop`, no parameter of ``module`` may be assigned to: ModelError, with its name.

    ``fully_shard`` would put its own back in the next forward, and no optimizer would train another one. torch calls a
    hook at an assignment, so that steps cost nothing.
    """

    def __init__(self, module: nn.Module, alias: str) -> None:
        self.model = type(module).__name__
        self.alias = alias
        self._names = {
            (id(owner), attribute): f"{path}.{attribute}" if path else attribute
            for path, owner in module.named_modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        }
        self._owners = list(module.modules())  # or another could come to have the id of one that is gone
        self._handle: Any = register_module_parameter_registration_hook(self._check)

    def stop(self) -> None:
        self._handle.remove()

    def _check(self, owner: nn.Module, attribute: str, parameter: nn.Parameter | None) -> None:
        name = self._names.get((id(owner), attribute))
        if name is None or parameter is owner._parameters.get(attribute) or _is_of_sharding():
            return
        raise ModelError(
            f"{name!r} of {self.model} is replaced by another Parameter while it is trained, after strategy "
            f"{self.alias!r} has divided the model among the ranks: neither would be what a forward uses. Write to it "
            "(weight.data = value), or replace it before fit or in configure_model"
        )


def _is_of_sharding() -> bool:
    """Return whether torch's own code for sharded parameters assigns; it does so to modules with any __setattr__."""
    frame: Any = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__")).startswith(_OF_SHARDING):
            return True
        frame = frame.f_back
    return False
