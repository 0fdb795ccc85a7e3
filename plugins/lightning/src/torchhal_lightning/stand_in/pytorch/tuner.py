"""Lightning's Tuner."""

from torchhal_lightning.tuner import LearningRates as _LRFinder
from torchhal_lightning.tuner import Tuner

__all__ = ["Tuner", "_LRFinder"]
