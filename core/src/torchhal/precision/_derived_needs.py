"""Derive the capabilities that a precision needs from the dtypes and features that it declares."""

from __future__ import annotations

from typing import Protocol

import torch

from torchhal.capabilities import LOSS_SCALING, autocast, compute, store


class _Declares(Protocol):
    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    wraps_autocast: bool
    features: frozenset[str]


def derive_needs(precision: _Declares) -> frozenset[str]:
    """Return the needs that follow from the dtypes, ``wraps_autocast`` and ``"scales_loss"`` in the features.

    Args:
        precision: a precision, or a class of one.
    """
    needs = store(precision.param_dtype) | compute(precision.compute_dtype)
    if precision.wraps_autocast:
        needs |= autocast(precision.compute_dtype)
    if "scales_loss" in precision.features:
        needs |= {LOSS_SCALING}
    return needs


class DerivedNeeds:
    """The value of ``Precision.needs`` where neither a class nor an instance sets one.

    A descriptor without ``__set__``: an assignment in a class body or in ``__init__`` takes its place.
    """

    def __get__(self, instance: _Declares | None, owner: type[_Declares]) -> frozenset[str]:
        return derive_needs(owner if instance is None else instance)  # type: ignore[arg-type]
