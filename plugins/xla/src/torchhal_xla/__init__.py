"""Provide TPUs and other XLA devices; the manifest is ``torchhal_xla._plugin``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_xla.accelerator import XLAAccelerator
    from torchhal_xla.checkpoint import XLACheckpointIO
    from torchhal_xla.data_parallel import XLAStrategy
    from torchhal_xla.environment import XLAEnvironment
    from torchhal_xla.single import SingleXLAStrategy
    from torchhal_xla.spmd import SPMDStrategy

__version__ = "0.2.0"

__all__ = ["SPMDStrategy", "SingleXLAStrategy", "XLAAccelerator", "XLACheckpointIO", "XLAEnvironment", "XLAStrategy"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "SPMDStrategy": "spmd",
        "SingleXLAStrategy": "single",
        "XLAAccelerator": "accelerator",
        "XLACheckpointIO": "checkpoint",
        "XLAEnvironment": "environment",
        "XLAStrategy": "data_parallel",
    },
)
