"""Intel Gaudi for torchhal: accelerator ``hpu``, its strategies, ``fp8``, fused optimizers and statistics.

Importing this package imports neither torch nor anything of Intel's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal_hpu.accelerator import HPUAccelerator
    from torchhal_hpu.checkpoint import HPUCheckpointIO
    from torchhal_hpu.optimizers import fused
    from torchhal_hpu.precision import FP8Precision, HPUMixedPrecision
    from torchhal_hpu.stats import HPUStats
    from torchhal_hpu.strategy import HPUParallelStrategy, HPUSingleStrategy

__version__ = "0.1.0"

_HOMES = {
    "FP8Precision": "precision",
    "HPUAccelerator": "accelerator",
    "HPUCheckpointIO": "checkpoint",
    "HPUMixedPrecision": "precision",
    "HPUParallelStrategy": "strategy",
    "HPUSingleStrategy": "strategy",
    "HPUStats": "stats",
    "fused": "optimizers",
}

__all__ = [
    "FP8Precision",
    "HPUAccelerator",
    "HPUCheckpointIO",
    "HPUMixedPrecision",
    "HPUParallelStrategy",
    "HPUSingleStrategy",
    "HPUStats",
    "fused",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
