"""List what this distribution provides, without importing torch or DeepSpeed."""

from __future__ import annotations

from typing import Any

from torchhal.plugin import Component, hookimpl

_VENDOR = ("deepspeed",)


@hookimpl
def torchhal_checkpoint_ios() -> list[Component]:
    return [
        Component(
            "deepspeed",
            "torchhal_deepspeed.checkpoint:DeepSpeedCheckpointIO",
            "a folder that DeepSpeed's engine writes, every rank its part",
        )
    ]


@hookimpl
def torchhal_strategies() -> list[Component]:
    def strategy(alias: str, summary: str, **defaults: Any) -> Component:
        target = "torchhal_deepspeed.strategy:DeepSpeedStrategy"
        return Component(alias, target, summary, defaults, requires=_VENDOR)

    return [
        strategy("deepspeed", "DeepSpeed's engine; ZeRO stage 2 where no configuration says another"),
        strategy("deepspeed_stage_1", "ZeRO: the optimizer's state divided among the ranks", stage=1),
        strategy("deepspeed_stage_2", "ZeRO: optimizer state and gradients divided", stage=2),
        strategy(
            "deepspeed_stage_2_offload",
            "ZeRO stage 2, optimizer state in host memory",
            stage=2,
            offload_optimizer="cpu",
        ),
        strategy("deepspeed_stage_3", "ZeRO: optimizer state, gradients and parameters divided", stage=3),
        strategy(
            "deepspeed_stage_3_offload",
            "ZeRO stage 3, optimizer state and parameters in host memory",
            stage=3,
            offload_optimizer="cpu",
            offload_parameters="cpu",
        ),
        strategy(
            "deepspeed_stage_3_offload_nvme",
            "ZeRO stage 3, optimizer state and parameters on NVMe",
            stage=3,
            offload_optimizer="nvme",
            offload_parameters="nvme",
        ),
    ]
