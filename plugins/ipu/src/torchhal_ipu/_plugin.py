"""List what this distribution provides, without importing torch or poptorch."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl

_VENDOR = ("poptorch",)


@hookimpl
def torchhal_accelerators() -> list[Component]:
    return [Component("ipu", "torchhal_ipu.accelerator:IPUAccelerator", "Graphcore IPU", requires=_VENDOR)]


@hookimpl
def torchhal_strategies() -> list[Component]:
    return [
        Component(
            "ipu_strategy",
            "torchhal_ipu.strategy:IPUStrategy",
            "compiled steps on one or several IPUs, through poptorch",
            requires=_VENDOR,
        )
    ]


@hookimpl
def torchhal_precisions() -> list[Component]:
    return [
        Component(
            "ipu-16-mixed",
            "torchhal_ipu.precision:IPUMixedPrecision",
            "float32 weights, float16 inputs and arithmetic, a scaled loss; '16-mixed' on ipu",
            requires=_VENDOR,
        )
    ]
