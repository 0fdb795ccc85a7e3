"""Precisions: the dtypes a model is trained in."""

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names
from torchhal.precision._casting import cast_tensors
from torchhal.precision.base import Precision, dense_gradient, needs_closure
from torchhal.precision.mixed import MixedPrecision
from torchhal.precision.true_precision import SinglePrecision, TruePrecision

__all__ = [
    "MixedPrecision",
    "Precision",
    "SinglePrecision",
    "TruePrecision",
    "cast_tensors",
    "dense_gradient",
    "needs_closure",
]

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__, __dir__ = lazy_names(__name__, {}, renamed={"FullPrecision": "TruePrecision"})
