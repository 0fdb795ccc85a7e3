"""Accelerators: the hardware a model trains on."""

from torchhal.accelerators.base import Accelerator
from torchhal.accelerators.cpu import CPUAccelerator

__all__ = ["Accelerator", "CPUAccelerator"]
