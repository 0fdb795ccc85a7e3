"""Train with a plugin of Colossal-AI's booster."""

from __future__ import annotations

from torchhal_colossalai._base import ColossalAIStrategy
from torchhal_colossalai._refused import ColossalAIGeminiStrategy, ColossalAIHybridStrategy
from torchhal_colossalai.ddp import ColossalAIDDPStrategy
from torchhal_colossalai.zero import ColossalAIZeroStrategy

__all__ = [
    "ColossalAIDDPStrategy",
    "ColossalAIGeminiStrategy",
    "ColossalAIHybridStrategy",
    "ColossalAIStrategy",
    "ColossalAIZeroStrategy",
]
