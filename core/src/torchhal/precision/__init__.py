"""Precisions: the dtypes a model is trained in."""

from torchhal.precision.base import Precision
from torchhal.precision.full import FullPrecision, SinglePrecision
from torchhal.precision.mixed import MixedPrecision

__all__ = ["FullPrecision", "MixedPrecision", "Precision", "SinglePrecision"]
