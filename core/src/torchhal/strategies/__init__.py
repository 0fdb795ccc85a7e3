"""Strategies: how a model, its optimizers and its processes act together."""

from torchhal.strategies.base import Strategy
from torchhal.strategies.ddp import DDPStrategy
from torchhal.strategies.parallel import ParallelStrategy
from torchhal.strategies.single_device import SingleDeviceStrategy

__all__ = ["DDPStrategy", "ParallelStrategy", "SingleDeviceStrategy", "Strategy"]
