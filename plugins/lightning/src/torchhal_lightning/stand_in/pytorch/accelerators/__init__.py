"""Lightning's accelerators, as names for torchhal's."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from torchhal_lightning.stand_in.pytorch.accelerators import cpu


class Accelerator:
    """Names an accelerator. For new hardware, subclass torchhal.accelerators.Accelerator."""

    _devices: ClassVar[str]

    @classmethod
    def is_available(cls) -> bool:
        return bool(cls.auto_device_count())

    @classmethod
    def auto_device_count(cls) -> int:
        module: Any = getattr(torch, cls._devices)
        return int(module.device_count())


class CPUAccelerator(Accelerator):
    """The CPU."""

    @classmethod
    def auto_device_count(cls) -> int:
        return 1


class CUDAAccelerator(Accelerator):
    """GPUs of CUDA or ROCm."""

    _devices = "cuda"


class MPSAccelerator(Accelerator):
    """The GPU of an Apple computer."""

    _devices = "mps"


class XLAAccelerator(Accelerator):
    """TPUs."""

    @classmethod
    def auto_device_count(cls) -> int:
        from torchhal.resolve import Request, resolve

        try:
            return len(resolve(Request(accelerator="tpu", devices="auto")).devices)
        except Exception:  # there is none, or no plugin for one
            return 0


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of GPUs that can allocate memory.

    Args:
        num_devices: how many; -1 for all.

    Raises:
        RuntimeError: there are fewer.
    """
    found = []
    for index in range(torch.cuda.device_count()):
        try:
            torch.empty(1, device=f"cuda:{index}")
        except RuntimeError:  # another process has it for itself
            continue
        found.append(index)
    if num_devices > len(found):
        raise RuntimeError(f"there are {len(found)} usable CUDA devices (asked for {num_devices})")
    return found if num_devices == -1 else found[:num_devices]


__all__ = [
    "Accelerator",
    "CPUAccelerator",
    "CUDAAccelerator",
    "MPSAccelerator",
    "XLAAccelerator",
    "cpu",
    "find_usable_cuda_devices",
]
