"""Find and set a setting where a module or a data module keeps it: as an attribute, or among hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MISSING = object()


def find_field(owners: Iterable[Any], name: str) -> Any:
    """Return the value of the first owner's attribute, or hyperparameter, of that name; None where there is none.

    Args:
        owners: modules and data modules; None among them is left out.
        name: such as ``"batch_size"``.
    """
    for owner in owners:
        if (value := getattr(owner, name, _MISSING)) is not _MISSING:
            return value
        if name in _hparams(owner):
            return _hparams(owner)[name]
    return None


def set_field(owners: Iterable[Any], name: str, value: Any) -> None:
    """Set the attribute and the hyperparameter of that name, of every owner that has one."""
    for owner in owners:
        if owner is not None and hasattr(owner, name):
            setattr(owner, name, value)
        if name in _hparams(owner):
            _hparams(owner)[name] = value


def _hparams(owner: Any) -> Any:
    return getattr(owner, "hparams", None) or {}
