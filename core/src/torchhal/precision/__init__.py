"""Precisions: the dtypes a model is trained in."""

from torchhal.precision.base import Precision
from torchhal.precision.mixed import MixedPrecision
from torchhal.precision.true_precision import FullPrecision, SinglePrecision

__all__ = ["FullPrecision", "MixedPrecision", "Precision", "SinglePrecision"]
