"""List what this distribution provides, without importing torch or Lightning."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_model_adapters() -> list[Component]:
    return [
        Component(
            "lightning",
            "torchhal_lightning.adapter:LightningAdapter",
            "LightningModules, LightningDataModules, callbacks and loggers of Lightning",
        )
    ]
