"""Tell which parameters Colossal-AI's ZeRO divides, and which values of an optimizer's state with them."""

from __future__ import annotations

from typing import Any

import torch

_NUMBERS = ("step", "mu_product", "eta", "mu")
"""Names of what torch's optimizers keep of a parameter in a tensor without a dimension."""


def is_divided(parameter: torch.Tensor) -> bool:
    """Return whether Colossal-AI can divide a parameter: one without an element, or of integers, it can't."""
    return parameter.numel() > 0 and parameter.is_floating_point()


def is_of(value: Any, name: str, parameter: torch.Tensor) -> bool:
    """Return whether a value of a parameter's state has a number for each element.

    Where the parameter has no dimension, the name tells.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return parameter.dim() > 0 or name not in _NUMBERS
