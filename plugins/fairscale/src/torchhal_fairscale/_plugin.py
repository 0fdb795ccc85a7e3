"""List what this distribution provides, without importing torch or fairscale."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_strategies() -> list[Component]:
    def strategy(alias: str, target: str, summary: str) -> Component:
        return Component(alias, f"torchhal_fairscale.{target}", summary)

    return [
        strategy(
            "fairscale_oss", "oss:FairscaleOSSStrategy", "data parallel, optimizer state divided by fairscale's OSS"
        ),
        strategy(
            "fairscale_sdp",
            "sharded_ddp:FairscaleSDPStrategy",
            "fairscale's ShardedDataParallel: optimizer state and gradients divided",
        ),
        strategy(
            "fairscale_pipe",
            "pipe:FairscalePipeStrategy",
            "fairscale's Pipe: layers on several devices of one process, batches in micro-batches",
        ),
    ]
