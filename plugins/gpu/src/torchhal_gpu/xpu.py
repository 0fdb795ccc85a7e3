"""Train on GPUs of Intel."""

from __future__ import annotations

from typing import ClassVar

import torch

from torchhal.plugin import Availability
from torchhal_gpu._stream_transfer import SideStreamAccelerator


class XPUAccelerator(SideStreamAccelerator):
    """GPUs of Intel. Indices count the devices that ``ZE_AFFINITY_MASK`` leaves visible."""

    name: ClassVar[str] = "xpu"
    device_type: ClassVar[str] = "xpu"
    backend: ClassVar[str] = "xccl"
    visible_devices: ClassVar[str] = "ZE_AFFINITY_MASK"
    features: ClassVar[frozenset[str]] = frozenset({"memory_stats", "threads", "visible_devices"})

    @classmethod
    def availability(cls) -> Availability:
        if torch.version.xpu is None:
            return Availability(
                False,
                f"torch {torch.__version__} was built without XPU: install a build that has it, as "
                "pytorch.org/get-started says",
            )
        return super().availability()

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """Return ``allocated``, ``peak``, ``reserved`` by this process; ``limit``, ``used`` (by all) of the device."""
        stats = super().memory_stats(device)
        free, limit = torch.xpu.mem_get_info(device)
        return {**stats, "limit": limit, "used": limit - free}
