"""Precisions: the dtypes a model is trained in."""

from torchhal.precision.base import Precision

__all__ = ["Precision"]
