"""Let optimizers step by one fused kernel, without the temporary tensors of torch's foreach implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

_FUSABLE = (Adam, AdamW)
"""Those whose fused kernels compute what the others compute, but for the order of additions."""


def can_fuse(optimizers: Sequence[Any], device_type: str) -> bool:
    """Return whether :func:`fuse` would change each of the optimizers, for parameters on ``device_type``."""
    return bool(optimizers) and all(_can_fuse(optimizer, device_type) for optimizer in optimizers)


def _can_fuse(optimizer: Any, device_type: str) -> bool:
    if type(optimizer) not in _FUSABLE or device_type not in _get_fused_kernels_supported_devices():
        return False
    return all(
        group.get("fused") is None
        and not group.get("foreach")
        and not group.get("differentiable")
        and not isinstance(group.get("lr"), torch.Tensor)
        and all(torch.is_floating_point(parameter) for parameter in group["params"])
        for group in optimizer.param_groups
    )


def fuse(optimizers: Sequence[Optimizer]) -> None:
    """Let each of the optimizers step by its fused kernel, which counts steps on the device."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(parameter.device, torch.float32)
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings["fused"], settings["foreach"] = True, False
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def unfuse(optimizers: Sequence[Optimizer]) -> None:
    """Give the optimizers back the implementation that torch chooses."""
    for optimizer in optimizers:
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings["fused"] = settings["foreach"] = None
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def as_unfused(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without the implementation that :func:`fuse` has set."""
    if "param_groups" not in state:
        return state
    return {**state, "param_groups": [{**group, "fused": None, "foreach": None} for group in state["param_groups"]]}
