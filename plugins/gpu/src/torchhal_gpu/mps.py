"""Train on the GPU of a Mac."""

from __future__ import annotations

from typing import ClassVar

import torch

from torchhal.accelerators import Accelerator
from torchhal.capabilities import STANDARD
from torchhal.errors import message_of
from torchhal.plugin import Availability


class MPSAccelerator(Accelerator):
    """The one GPU of a Mac with Apple silicon, through Metal. It has no process-group backend."""

    name: ClassVar[str] = "mps"
    device_type: ClassVar[str] = "mps"
    backend: ClassVar[str] = ""
    capabilities: ClassVar[frozenset[str]] = frozenset(
        capability for capability in STANDARD if not capability.startswith("collective:")
    )
    indexed: ClassVar[bool] = False
    start_methods: ClassVar[frozenset[str]] = frozenset({"spawn", "forkserver"})

    @classmethod
    def availability(cls) -> Availability:
        if not torch.backends.mps.is_built():
            return Availability(False, f"torch {torch.__version__} was built without MPS, which is for macOS")
        if not torch.backends.mps.is_available():
            return Availability(False, "MPS needs macOS 14 or newer and a Mac with Apple silicon")
        return Availability(True)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise Metal's answer to one buffer beyond its limit, ``Invalid buffer size``, too."""
        return super().is_out_of_memory(error) or (
            isinstance(error, RuntimeError) and "Invalid buffer size" in message_of(error)
        )

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """Return ``allocated`` by tensors, ``reserved`` by this process and the ``limit`` that Metal recommends.

        No peak is kept.
        """
        return {
            "allocated": torch.mps.current_allocated_memory(),
            "reserved": torch.mps.driver_allocated_memory(),
            "limit": torch.mps.recommended_max_memory(),
        }
