"""List what this distribution provides, without importing torch."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_accelerators() -> list[Component]:
    return [
        Component(
            "sim",
            "torchhal_simulator.accelerator:SimAccelerator",
            summary="a simulated accelerator with memory of its own, for tests without hardware",
        )
    ]
