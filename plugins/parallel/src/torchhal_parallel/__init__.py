"""The strategies that plain PyTorch can carry: parts of one model on several ranks, on any accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_parallel.checkpoint.asynchronous import AsyncCheckpointIO
    from torchhal_parallel.checkpoint.dcp import DCPCheckpointIO
    from torchhal_parallel.data_parallel import DataParallelStrategy
    from torchhal_parallel.fsdp import FSDPStrategy
    from torchhal_parallel.hybrid import HybridStrategy
    from torchhal_parallel.zero1 import ZeRO1Strategy

__version__ = "0.2.0"

__all__ = [
    "AsyncCheckpointIO",
    "DCPCheckpointIO",
    "DataParallelStrategy",
    "FSDPStrategy",
    "HybridStrategy",
    "ZeRO1Strategy",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncCheckpointIO": "checkpoint.asynchronous",
        "DCPCheckpointIO": "checkpoint.dcp",
        "DataParallelStrategy": "data_parallel",
        "FSDPStrategy": "fsdp",
        "HybridStrategy": "hybrid",
        "ZeRO1Strategy": "zero1",
    },
)
