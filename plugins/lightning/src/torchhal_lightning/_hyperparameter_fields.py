"""Check that a LightningModule or its data has a setting, as an attribute or among hyperparameters."""

from __future__ import annotations

import warnings
from typing import Any

from torchhal import tuning
from torchhal.errors import ConfigurationError


def check_field(model: Any, datamodule: Any, name: str) -> None:
    """Raise ConfigurationError where nobody has it; warn where the model has two."""
    if tuning.find_field((model, datamodule), name) is None:
        raise ConfigurationError(
            f"there is no field {name!r} in the model, the data module or the hyperparameters of either"
        )
    if hasattr(model, name) and name in (getattr(model, "hparams", None) or {}):
        warnings.warn(f"the model has an attribute and a hyperparameter {name!r}: the attribute counts", stacklevel=2)
