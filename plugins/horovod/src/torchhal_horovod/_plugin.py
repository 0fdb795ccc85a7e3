"""List what this distribution provides, without importing torch or Horovod."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_strategies() -> list[Component]:
    return [
        Component(
            "horovod",
            "torchhal_horovod.strategy:HorovodStrategy",
            "data parallel with Horovod: gradients averaged while backward runs",
        )
    ]


@hookimpl
def torchhal_cluster_environments() -> list[Component]:
    return [
        Component("horovod", "torchhal_horovod.environment:HorovodEnvironment", "processes that horovodrun has started")
    ]
