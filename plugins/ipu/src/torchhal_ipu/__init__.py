"""Graphcore IPUs for torchhal: accelerator ``ipu`` and strategy ``ipu_strategy``.

Importing this package imports neither torch nor poptorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal_ipu.accelerator import IPUAccelerator
    from torchhal_ipu.precision import IPUMixedPrecision
    from torchhal_ipu.strategy import IPUStrategy

__version__ = "0.1.0"

_HOMES = {
    "IPUAccelerator": "accelerator",
    "IPUMixedPrecision": "precision",
    "IPUStrategy": "strategy",
}

__all__ = ["IPUAccelerator", "IPUMixedPrecision", "IPUStrategy"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
