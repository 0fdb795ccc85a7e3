"""Compute in half the width on IPUs: float16 inputs, and float32 weights."""

from __future__ import annotations

from typing import Any

import torch

from torchhal.capabilities import compute, store
from torchhal.errors import ConfigurationError
from torchhal.precision import Precision, cast_tensors
from torchhal_ipu.accelerator import MIXED_INPUTS


class IPUMixedPrecision(Precision):
    """``16-mixed`` on ``ipu``: weights and their updates in float32, inputs in float16.

    poptorch converts weights to float16 where they meet a float16 input, so that layers compute in it. There is no
    autocast: what an operator is given decides.

    Args:
        loss_scaling: what the loss is multiplied by before backward, and the gradients divided by after it; ``"auto"``
            lets poptorch find and adapt it (``setAutomaticLossScaling``). A ``poptorch.optim`` optimizer with a
            ``loss_scaling`` of its own keeps that.
    """

    alias = "ipu-16-mixed"
    param_dtype = torch.float32
    compute_dtype = torch.float16
    needs: frozenset[str] = compute(torch.float16) | store(torch.float32) | {MIXED_INPUTS}

    def __init__(self, loss_scaling: float | str = 128.0) -> None:
        number = isinstance(loss_scaling, int | float) and not isinstance(loss_scaling, bool) and loss_scaling > 0
        if not number and loss_scaling != "auto":
            raise ConfigurationError(f"'loss_scaling' must be a number above 0, or 'auto' (got {loss_scaling!r})")
        self.loss_scaling = loss_scaling

    def convert_input(self, batch: Any) -> Any:
        return cast_tensors(batch, torch.float16)

    def convert_output(self, output: Any) -> Any:
        return cast_tensors(output, torch.get_default_dtype())
