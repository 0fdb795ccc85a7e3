"""Provide strategy ``bagua``: data parallel training through Bagua.

Importing this package imports neither torch nor Bagua.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_bagua.strategy import BaguaStrategy

__version__ = "0.2.0"

__all__ = ["BaguaStrategy"]

__getattr__, __dir__ = lazy_names(__name__, {"BaguaStrategy": "strategy"})
