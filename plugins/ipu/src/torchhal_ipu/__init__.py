"""Provide Graphcore IPUs: accelerator ``ipu`` and strategy ``ipu_strategy``.

Importing this package imports neither torch nor poptorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_ipu.accelerator import IPUAccelerator
    from torchhal_ipu.precision import IPUMixedPrecision
    from torchhal_ipu.strategy import IPUStrategy

__version__ = "0.2.0"

__all__ = ["IPUAccelerator", "IPUMixedPrecision", "IPUStrategy"]

__getattr__, __dir__ = lazy_names(
    __name__, {"IPUAccelerator": "accelerator", "IPUMixedPrecision": "precision", "IPUStrategy": "strategy"}
)
