"""Declare the booster's plugins that a Trainer can't drive, and refuse them before launch with the reason."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from torchhal.composition import Composition
from torchhal.errors import UnsupportedCombinationError
from torchhal_colossalai._base import ColossalAIStrategy


class _RefusedStrategy(ColossalAIStrategy):
    """A plugin of the booster's that a Trainer can't drive."""

    on_cpu: ClassVar[str]
    """Why it can't work on a CPU."""
    on_accelerators: ClassVar[str]
    """What it would ask of a Trainer on an accelerator."""
    instead: ClassVar[str]

    def check_fit(self, composition: Composition) -> None:
        super().check_fit(composition)
        if composition.accelerator.device_type == "cpu":
            self._refuse("can't work on a CPU", self.on_cpu)
        self._refuse("isn't driven by a Trainer yet", self.on_accelerators)

    def _refuse(self, what: str, why: str) -> NoReturn:
        name = self.display_name
        raise UnsupportedCombinationError(
            f"strategy {name!r}, the booster's plugin {self.default_plugin!r}, {what}: {why}. Use {self.instead}"
        )


class ColossalAIGeminiStrategy(_RefusedStrategy):
    """:class:`ColossalAIStrategy` with the booster's plugin ``gemini``, which is refused.

    Gemini divides parameters in chunks, which it moves between device and host.
    """

    default_plugin: ClassVar[str] = "gemini"
    on_cpu: ClassVar[str] = "it moves chunks of parameters by streams and memory statistics of CUDA or NPU"
    on_accelerators: ClassVar[str] = (
        "it trains in fp16 or bf16 by rules and a loss scale of its own, in place of the Trainer's precision, steps "
        "Colossal-AI's FusedAdam, HybridAdam and CPUAdam alone, and has not been tried with this package on a GPU"
    )
    instead: ClassVar[str] = (
        "'zero3' of torchhal-parallel, or 'colossalai_zero2' where the parameters fit on each device"
    )


class ColossalAIHybridStrategy(_RefusedStrategy):
    """:class:`ColossalAIStrategy` with the booster's plugin ``hybrid_parallel``, which is refused.

    It combines tensor, pipeline and sequence parallelism for models of transformers.
    """

    default_plugin: ClassVar[str] = "hybrid_parallel"
    on_cpu: ClassVar[str] = (
        "its layers and schedules use streams and fused kernels of CUDA or NPU, and it divides by written policies "
        "only models of transformers"
    )
    on_accelerators: ClassVar[str] = (
        "it runs whole batches through a schedule of its own in place of training_step, divides by written policies "
        "only models of transformers, and has not been tried with this package on a GPU"
    )
    instead: ClassVar[str] = "'tensor_parallel', 'pipeline' or 'hybrid' of torchhal-parallel"
