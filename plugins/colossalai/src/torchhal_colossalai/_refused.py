"""Declare the booster's plugins that need another accelerator than a CPU, and refuse them with the reason."""

from __future__ import annotations

from typing import ClassVar

from torchhal.composition import Composition
from torchhal.errors import UnsupportedCombinationError
from torchhal_colossalai._base import ColossalAIStrategy


class _RefusedStrategy(ColossalAIStrategy):
    """A plugin of the booster's that can't train here."""

    why_not_on_cpu: ClassVar[str]

    def check_fit(self, composition: Composition) -> None:
        super().check_fit(composition)
        raise UnsupportedCombinationError(self.why_not_on_cpu)


class ColossalAIGeminiStrategy(_RefusedStrategy):
    default_plugin: ClassVar[str] = "gemini"


class ColossalAIHybridStrategy(_RefusedStrategy):
    default_plugin: ClassVar[str] = "hybrid_parallel"
