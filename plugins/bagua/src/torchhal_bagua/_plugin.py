"""List what this distribution provides, without importing torch or Bagua."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_strategies() -> list[Component]:
    return [
        Component(
            "bagua",
            "torchhal_bagua.strategy:BaguaStrategy",
            "data parallel with Bagua: exact, compressed, decentralized or asynchronous averages",
            requires=("bagua",),
        )
    ]
