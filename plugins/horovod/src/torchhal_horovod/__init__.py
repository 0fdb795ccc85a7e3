"""Provide strategy and cluster environment ``horovod``: data parallel training through Horovod.

Importing this package imports neither torch nor Horovod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_horovod.environment import HorovodEnvironment
    from torchhal_horovod.strategy import HorovodStrategy

__version__ = "0.2.0"

__all__ = ["HorovodEnvironment", "HorovodStrategy"]

__getattr__, __dir__ = lazy_names(__name__, {"HorovodEnvironment": "environment", "HorovodStrategy": "strategy"})
