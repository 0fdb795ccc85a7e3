"""Provide decentralized training with hivemind: peers over the internet train one model, and come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_hivemind.strategy import HivemindStrategy

__version__ = "0.2.0"

__all__ = ["HivemindStrategy"]

__getattr__, __dir__ = lazy_names(__name__, {"HivemindStrategy": "strategy"})
