"""List what this distribution provides, without importing torch or ray."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_cluster_environments() -> list[Component]:
    return [
        Component(
            "ray",
            "torchhal_ray.environment:RayEnvironment",
            "workers as actors on a Ray cluster",
            requires=("ray",),
        )
    ]
