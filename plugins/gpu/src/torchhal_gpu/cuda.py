"""Train on NVIDIA and AMD GPUs, both through ``torch.cuda``."""

from __future__ import annotations

import os
import re
from typing import ClassVar

import torch

from torchhal.capabilities import STANDARD, TF32, compute, store
from torchhal.errors import message_of
from torchhal.plugin import Availability
from torchhal_gpu import _nvml as nvml
from torchhal_gpu._stream_transfer import SideStreamAccelerator

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_LIBRARY_ALLOCATION = re.compile(r"(CUBLAS|HIPBLAS|CUDNN)_STATUS_ALLOC_FAILED|CUDNN_STATUS_NOT_SUPPORTED")
"""cuDNN says that an algorithm isn't supported where its workspace doesn't fit."""


class GPUAccelerator(SideStreamAccelerator):
    """GPUs of NVIDIA (CUDA) and AMD (ROCm). Indices count the devices that ``CUDA_VISIBLE_DEVICES`` leaves visible."""

    name: ClassVar[str] = "gpu"
    device_type: ClassVar[str] = "cuda"
    backend: ClassVar[str] = "nccl"  # which is RCCL in builds for ROCm
    capabilities: ClassVar[frozenset[str]] = STANDARD | compute(torch.float64) | store(torch.float64) | {TF32}
    auto_priority: ClassVar[int | None] = 60
    visible_devices: ClassVar[str] = "CUDA_VISIBLE_DEVICES"  # ROCm reads it, too
    features: ClassVar[frozenset[str]] = frozenset({"memory_stats", "threads", "visible_devices"})

    @classmethod
    def availability(cls) -> Availability:
        """Count devices with NVML where it can, so that a process which forks later may still use them."""
        if torch.version.cuda is None and torch.version.hip is None:
            return Availability(
                False,
                f"torch {torch.__version__} was built for neither CUDA nor ROCm: install a build that fits your GPU, "
                "as pytorch.org/get-started says",
            )
        try:
            if torch.cuda.device_count():
                return Availability(True)
        except RuntimeError as error:
            return Availability(False, f"{type(error).__name__}: {error}")
        hidden = [f"{name}={os.environ[name]!r}" for name in VISIBLE_DEVICES if name in os.environ]
        if hidden:
            return Availability(False, f"torch sees no GPU, perhaps because of {', '.join(hidden)}")
        return Availability(False, f"torch sees no GPU: {nvml.problem() or 'is the driver installed and loaded?'}")

    def set_benchmark(self, enabled: bool) -> None:
        torch.backends.cudnn.benchmark = enabled

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise the status of cuBLAS and cuDNN too, which allocate beside torch and have no words for it."""
        return super().is_out_of_memory(error) or (
            isinstance(error, RuntimeError) and _LIBRARY_ALLOCATION.search(message_of(error)) is not None
        )

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """Return ``allocated``, ``peak``, ``reserved`` by this process; ``limit``, ``used`` (by all) of the device."""
        stats = super().memory_stats(device)
        used, limit = nvml.memory(device) or _memory(device)
        return {**stats, "limit": limit, "used": used}

    def device_stats(self, device: torch.device) -> dict[str, float]:
        """Return utilization, temperature, power and clock by NVML (``nvidia-ml-py``) or AMD SMI, where it is there."""
        stats = super().device_stats(device)
        if torch.version.hip is not None and "power_watts" in stats:
            stats["power_watts"] *= 1000  # AMD SMI gives watts, which torch passes on; torch documents milliwatts
        return stats


def _memory(device: torch.device) -> tuple[int, int]:
    free, limit = torch.cuda.mem_get_info(device)
    return limit - free, limit
