"""Train in one process on one XLA device."""

from __future__ import annotations

from torchhal.strategies import SingleDeviceStrategy
from torchhal_xla._xla_base import LazyStrategy


class SingleXLAStrategy(LazyStrategy, SingleDeviceStrategy):
    """Training on one XLA device, with one graph run for each batch."""
