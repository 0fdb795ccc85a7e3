"""Provide Intel Gaudi: accelerator ``hpu``, its strategies, ``fp8``, fused optimizers and statistics.

Importing this package imports neither torch nor anything of Intel's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_hpu.accelerator import HPUAccelerator
    from torchhal_hpu.checkpoint import HPUCheckpointIO
    from torchhal_hpu.optimizers import fused
    from torchhal_hpu.precision import FP8Precision, HPUMixedPrecision
    from torchhal_hpu.stats import HPUStats
    from torchhal_hpu.strategy import HPUParallelStrategy, HPUSingleStrategy

__version__ = "0.2.0"

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "FP8Precision": "precision",
        "HPUAccelerator": "accelerator",
        "HPUCheckpointIO": "checkpoint",
        "HPUMixedPrecision": "precision",
        "HPUParallelStrategy": "strategy",
        "HPUSingleStrategy": "strategy",
        "HPUStats": "stats",
        "fused": "optimizers",
    },
)
