"""List what this distribution provides, without importing torch or Colossal-AI."""

from __future__ import annotations

from typing import Any

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_strategies() -> list[Component]:
    def strategy(alias: str, summary: str, plugin: str, **options: Any) -> Component:
        defaults: dict[str, Any] = {"plugin": plugin, **({"options": options} if options else {})}
        return Component(alias, "torchhal_colossalai.strategy:ColossalAIStrategy", summary, defaults)

    return [
        strategy("colossalai", "Colossal-AI's booster: data parallel, or another of its plugins", "torch_ddp"),
        strategy("colossalai_zero1", "Colossal-AI: optimizer state divided among the ranks", "low_level_zero", stage=1),
        strategy("colossalai_zero2", "Colossal-AI: optimizer state and gradients divided", "low_level_zero", stage=2),
        strategy("colossalai_gemini", "refused: Colossal-AI's Gemini, which no Trainer can drive yet", "gemini"),
    ]
