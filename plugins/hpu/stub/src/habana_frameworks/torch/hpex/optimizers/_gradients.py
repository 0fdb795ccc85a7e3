"""What the fused optimizers share."""

from __future__ import annotations

from typing import Any

import torch


def with_gradients(group: dict[str, Any], name: str) -> list[torch.nn.Parameter]:
    """Return the parameters of ``group`` that have a gradient; RuntimeError for a sparse one."""
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    if any(parameter.grad.is_sparse for parameter in parameters):
        raise RuntimeError(f"{name} does not support sparse gradients")
    return parameters
