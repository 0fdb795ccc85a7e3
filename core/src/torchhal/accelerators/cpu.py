"""The host's processors."""

from __future__ import annotations

import os
from typing import ClassVar

import torch

from torchhal.accelerators._host_memory import available_host_memory
from torchhal.accelerators.base import Accelerator
from torchhal.capabilities import STANDARD, compute, store

__all__ = [
    "CPUAccelerator",
]


class CPUAccelerator(Accelerator):
    """The CPU. ``devices=n`` means n processes; more than there are cores is allowed, but rarely useful."""

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    capabilities: ClassVar[frozenset[str]] = STANDARD | compute(torch.float64) | store(torch.float64)
    indexed: ClassVar[bool] = False
    oversubscribable: ClassVar[bool] = True
    auto_priority: ClassVar[int | None] = 0

    def device_count(self) -> int:
        """Return the number of cores this process may run on, which ``devices=-1`` selects."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def auto_device_count(self) -> int:
        """Return one: a single process already uses every core."""
        return 1

    def setup_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"'device' must be of type 'cpu' for accelerator 'cpu' (got {device})")

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: torch.device | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every other device too

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        torch.set_rng_state(state)

    def available_memory(self, device: torch.device) -> int | None:
        """Return the host memory that is available, within the limits of this process's cgroups."""
        return available_host_memory()

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        pass
