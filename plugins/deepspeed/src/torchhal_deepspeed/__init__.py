"""Provide strategies that train through DeepSpeed's engine, and its checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_deepspeed.checkpoint import DeepSpeedCheckpointIO
    from torchhal_deepspeed.strategy import DeepSpeedStrategy

__version__ = "0.2.0"

__all__ = ["DeepSpeedCheckpointIO", "DeepSpeedStrategy"]

__getattr__, __dir__ = lazy_names(__name__, {"DeepSpeedCheckpointIO": "checkpoint", "DeepSpeedStrategy": "strategy"})
