"""Keep an optimizer's state in the dtypes that the precision gives it, at its creation and when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal._overrides import overrides
from torchhal.precision import Precision
from torchhal.pytree import map_tensors


def chooses_state_dtypes(precision: Precision) -> bool:
    """Return whether the precision overrides ``optimizer_state_dtype``."""
    return overrides(precision, Precision, "optimizer_state_dtype")


def restore_state_dtypes(precision: Precision, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Replace what a load has cast to a parameter's dtype by the values of ``saved``, in the precision's dtype.

    ``Optimizer.load_state_dict`` casts all state of floating-point parameters but ``step`` to the dtype of the
    parameter: float32 moments of bfloat16 weights would lose their digits.

    Args:
        precision: the precision of the run.
        optimizer: it has loaded ``saved``.
        saved: in the form of ``Optimizer.state_dict``, with tensors in the layouts of the parameters.
    """
    if not chooses_state_dtypes(precision):
        return
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        own, entry = optimizer.state.get(parameter, {}), saved["state"].get(number, {})
        for name in own.keys() & entry.keys():
            dtype = _wanted(precision, parameter, name)
            if dtype is not None:
                own[name] = map_tensors(entry[name], partial(_placed, dtype=dtype, device=parameter.device))


def convert_state(precision: Precision, optimizer: Optimizer) -> None:
    """Cast the optimizer's state to the dtypes that the precision gives it."""
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            dtype = _wanted(precision, parameter, name)
            if dtype is not None:
                entry[name] = map_tensors(value, partial(_placed, dtype=dtype))


def converting_step(precision: Precision) -> Callable[..., Any] | None:
    """Return ``precision.optimizer_step`` with new state cast after it; None where the precision chooses no dtypes.

    torch's optimizers create the state of a parameter in its first step with a gradient.
    """
    if not chooses_state_dtypes(precision):
        return None

    def run(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        before = len(optimizer.state)
        result = precision.optimizer_step(optimizer, closure)
        if len(optimizer.state) != before:
            convert_state(precision, optimizer)
        return result

    return run


def _wanted(precision: Precision, parameter: Any, name: str) -> torch.dtype | None:
    if name == "step" or not isinstance(parameter, torch.Tensor):
        return None
    return precision.optimizer_state_dtype(parameter, name)


def _placed(value: Any, *, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value if device is None else value.to(device)
    return value.to(device=device, dtype=dtype)
