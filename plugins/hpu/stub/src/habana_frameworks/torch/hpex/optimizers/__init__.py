"""Optimizers that update all parameters of a group in one operator."""

from .FusedAdagrad import FusedAdagrad
from .FusedAdamW import FusedAdamW
from .FusedSGD import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdamW", "FusedSGD"]
