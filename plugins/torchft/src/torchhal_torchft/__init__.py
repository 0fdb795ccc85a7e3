"""Provide fault-tolerant data parallel training: replica groups leave and come back, the others train on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_torchft.strategy import TorchFTStrategy

__version__ = "0.2.0"

__all__ = ["TorchFTStrategy"]

__getattr__, __dir__ = lazy_names(__name__, {"TorchFTStrategy": "strategy"})
