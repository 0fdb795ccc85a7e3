"""List what this distribution provides, without importing torch or anything of Intel's."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl

_VENDOR = ("habana_frameworks",)


@hookimpl
def torchhal_accelerators() -> list[Component]:
    return [Component("hpu", "torchhal_hpu.accelerator:HPUAccelerator", "Intel Gaudi", requires=_VENDOR)]


@hookimpl
def torchhal_strategies() -> list[Component]:
    return [
        Component("hpu_single", "torchhal_hpu.strategy:HPUSingleStrategy", "one Gaudi", requires=_VENDOR),
        Component("hpu_parallel", "torchhal_hpu.strategy:HPUParallelStrategy", "ddp on Gaudis", requires=_VENDOR),
    ]


@hookimpl
def torchhal_precisions() -> list[Component]:
    return [
        Component(
            "hpu-fp8",
            "torchhal_hpu.precision:FP8Precision",
            "linear layers in float8, the rest in bfloat16, on Gaudi 2 and later; 'fp8' on hpu",
            requires=_VENDOR,
        )
    ]


@hookimpl
def torchhal_checkpoint_ios() -> list[Component]:
    return [Component("hpu", "torchhal_hpu.checkpoint:HPUCheckpointIO", "torch's file, of copies on the host")]
