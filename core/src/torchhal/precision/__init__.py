"""Precisions: the dtypes a model is trained in."""

from torchhal.precision._casting import cast_tensors
from torchhal.precision.base import Precision, dense_gradient, needs_closure
from torchhal.precision.mixed import MixedPrecision
from torchhal.precision.true_precision import FullPrecision, SinglePrecision

__all__ = [
    "FullPrecision",
    "MixedPrecision",
    "Precision",
    "SinglePrecision",
    "cast_tensors",
    "dense_gradient",
    "needs_closure",
]
