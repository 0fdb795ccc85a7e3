"""Declare what an accelerator has as capabilities, and derive them from the lists that older plugins set."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Final

import torch

from torchhal._replaced_declarations import warn_replaced
from torchhal.capabilities import LOSS_SCALING, STANDARD, autocast, collective, compute, store

_OF_PRECISIONS: Final = ("compute", "store", "autocast", LOSS_SCALING)
"""Words that the list ``precisions`` decides; other words of a class that sets it are inherited."""

NEEDS_OF_ALIASES: Final[Mapping[str, frozenset[str]]] = {
    "32-true": compute(torch.float32) | store(torch.float32),
    "64-true": compute(torch.float64) | store(torch.float64),
    "16-true": compute(torch.float16) | store(torch.float16),
    "bf16-true": compute(torch.bfloat16) | store(torch.bfloat16),
    "16-mixed": compute(torch.float16) | store(torch.float32) | autocast(torch.float16) | {LOSS_SCALING},
    "bf16-mixed": compute(torch.bfloat16) | store(torch.float32) | autocast(torch.bfloat16),
}
"""Alias -> needs, of core's precisions, which accelerators listed before they declared capabilities."""


class DeclaredCapabilities:
    """The capabilities of an accelerator's class, and the attributes that they replace."""

    capabilities: ClassVar[frozenset[str]] = STANDARD
    """Words for what the device and its process-group backend have, from ``torchhal.capabilities`` or a vendor's.

    A precision or strategy that needs another one is refused before launch. The default is that of hardware which torch
    drives like a GPU: float32, float16 and bfloat16, autocast, loss scaling, and a backend with all collectives. A
    class that differs adds to it, subtracts from it, or declares its own::

        capabilities = Accelerator.capabilities | compute(torch.float64) | store(torch.float64) | {"fp8:e4m3"}

    Checks: ACC-16.
    """

    precisions: ClassVar[frozenset[str]] = frozenset({"32-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed"})
    """Aliases of core's precisions whose needs the :attr:`capabilities` meet, which replace this attribute.

    A class that sets it gets capabilities derived from it, and a FutureWarning.
    """

    backend_averages: ClassVar[bool] = True
    """True if ``"collective:avg"`` is among the :attr:`capabilities`, which replace this attribute.

    A class that sets it gets capabilities derived from it, and a FutureWarning.
    """

    _lists_precisions: ClassVar[bool] = False
    """True if the class that declares nearest sets ``precisions`` instead of ``capabilities``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = vars(cls)
        if "capabilities" in declared:
            cls._lists_precisions = False
            _fill_replaced(cls)
            return
        if isinstance(declared.get("precisions"), Collection):
            warn_replaced(cls, "precisions", "declare 'capabilities', the words of torchhal.capabilities")
            cls._lists_precisions = True
            cls.capabilities = _without(cls.capabilities, _OF_PRECISIONS).union(
                *(NEEDS_OF_ALIASES.get(alias, frozenset()) for alias in cls.precisions)
            )
        if isinstance(declared.get("backend_averages"), bool):
            warn_replaced(cls, "backend_averages", "declare 'collective:avg' in 'capabilities', or leave it out there")
            average = collective("avg")
            cls.capabilities = cls.capabilities | average if cls.backend_averages else cls.capabilities - average


def _without(capabilities: frozenset[str], words: Collection[str]) -> frozenset[str]:
    return frozenset(capability for capability in capabilities if capability.partition(":")[0] not in words)


def _fill_replaced(cls: type[DeclaredCapabilities]) -> None:
    """Set the replaced attributes by the class's capabilities, unless it sets them for older releases of core."""
    declared: object = cls.capabilities
    if not isinstance(declared, frozenset | set):  # refused where it is read
        return
    if "precisions" not in vars(cls):
        cls.precisions = frozenset(alias for alias, needs in NEEDS_OF_ALIASES.items() if needs <= declared)
    if "backend_averages" not in vars(cls):
        cls.backend_averages = "collective:avg" in declared
