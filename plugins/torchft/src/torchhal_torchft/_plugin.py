"""List what this distribution provides, without importing torch or TorchFT."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_strategies() -> list[Component]:
    return [
        Component(
            "torchft",
            "torchhal_torchft.strategy:TorchFTStrategy",
            "replica groups that leave and come back while the others train on",
            requires=("torchft",),
        )
    ]
