"""List what this distribution provides, without importing torch or hivemind."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_strategies() -> list[Component]:
    return [
        Component(
            "hivemind",
            "torchhal_hivemind.strategy:HivemindStrategy",
            "peers over the internet train one model, and come and go",
            requires=("hivemind",),
            aliases=("collaborative",),
        )
    ]
