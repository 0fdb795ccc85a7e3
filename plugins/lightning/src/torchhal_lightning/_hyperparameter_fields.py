"""Find and set a setting where a LightningModule keeps it: as an attribute, or among hyperparameters."""

from __future__ import annotations

import warnings
from typing import Any

from torchhal.errors import ConfigurationError

_MISSING = object()


def _owners(model: Any, datamodule: Any) -> list[Any]:
    return [model] if datamodule is None else [model, datamodule]


def _hparams(owner: Any) -> Any:
    return getattr(owner, "hparams", None) or {}


def find_field(model: Any, datamodule: Any, name: str) -> Any:
    """Return the value of the model's or the data module's attribute or hyperparameter; None where there is none."""
    for owner in _owners(model, datamodule):
        if (value := getattr(owner, name, _MISSING)) is not _MISSING:
            return value
        if name in _hparams(owner):
            return _hparams(owner)[name]
    return None


def check_field(model: Any, datamodule: Any, name: str) -> None:
    """Raise ConfigurationError where nobody has it; warn where the model has two."""
    if find_field(model, datamodule, name) is None:
        raise ConfigurationError(
            f"there is no field {name!r} in the model, the data module or the hyperparameters of either"
        )
    if hasattr(model, name) and name in _hparams(model):
        warnings.warn(f"the model has an attribute and a hyperparameter {name!r}: the attribute counts", stacklevel=2)


def set_field(model: Any, datamodule: Any, name: str, value: Any) -> None:
    """Set it wherever there is one of that name."""
    for owner in _owners(model, datamodule):
        if hasattr(owner, name):
            setattr(owner, name, value)
        if name in _hparams(owner):
            _hparams(owner)[name] = value
