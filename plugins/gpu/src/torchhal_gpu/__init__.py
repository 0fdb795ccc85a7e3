"""Provide accelerators ``gpu`` (``cuda``), ``xpu`` and ``mps``, and the precision ``tf32``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_gpu.cuda import GPUAccelerator
    from torchhal_gpu.mps import MPSAccelerator
    from torchhal_gpu.tf32 import TF32Precision
    from torchhal_gpu.xpu import XPUAccelerator

__version__ = "0.2.0"

__all__ = ["GPUAccelerator", "MPSAccelerator", "TF32Precision", "XPUAccelerator"]

__getattr__, __dir__ = lazy_names(
    __name__, {"GPUAccelerator": "cuda", "MPSAccelerator": "mps", "TF32Precision": "tf32", "XPUAccelerator": "xpu"}
)
