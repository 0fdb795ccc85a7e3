"""Provide strategies ``colossalai``, ``colossalai_zero1``, ``colossalai_zero2`` and ``colossalai_gemini``.

They are the booster plugins of Colossal-AI. Importing this package imports neither torch nor Colossal-AI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_colossalai.strategy import ColossalAIDDPStrategy, ColossalAIStrategy, ColossalAIZeroStrategy

__version__ = "0.2.0"

__all__ = ["ColossalAIDDPStrategy", "ColossalAIStrategy", "ColossalAIZeroStrategy"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "strategy"))
