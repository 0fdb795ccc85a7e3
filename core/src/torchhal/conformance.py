"""Forward the names of ``torchhal.conformance``, which moved, to the distribution torchhal-conformance."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    try:
        moved = importlib.import_module("torchhal_conformance")
    except ModuleNotFoundError as error:
        if error.name != "torchhal_conformance":
            raise
        raise ModuleNotFoundError(
            "torchhal.conformance is a distribution of its own now: pip install 'torchhal[conformance]', and import "
            "torchhal_conformance",
            name=error.name,
        ) from None
    value = getattr(moved, name)
    warnings.warn(
        f"torchhal.conformance.{name} has moved: import {name} from torchhal_conformance",
        DeprecationWarning,
        stacklevel=2,
    )
    return value
