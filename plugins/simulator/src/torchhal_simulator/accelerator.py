"""Declare the simulated accelerator, without strategy code."""

from __future__ import annotations

from typing import ClassVar

from torchhal.accelerators import Accelerator
from torchhal.capabilities import STANDARD


class SimAccelerator(Accelerator):
    """A simulated accelerator: torch device ``sim``, several per machine, collectives over gloo.

    It computes nothing faster than the CPU, so ``accelerator="auto"`` never takes it.
    """

    name: ClassVar[str] = "sim"
    device_type: ClassVar[str] = "sim"
    backend: ClassVar[str] = "sim"
    capabilities: ClassVar[frozenset[str]] = STANDARD
    auto_priority: ClassVar[int | None] = None
    features: ClassVar[frozenset[str]] = frozenset({"memory_stats", "threads"})

    @classmethod
    def load(cls) -> None:
        from torchhal_simulator._library import load

        load()
