"""Precisions that differ from sound ones in one mistake each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from sound_components import SameMixed16, SameMixedBf16, SameTrueBf16
from torch.optim import Optimizer
from zoo import caught_by

from torchhal.precision import cast_tensors, dense_gradient
from torchhal.pytree import map_tensors


@caught_by("PRE-11")
class OneSidedClipPrecision(SameMixedBf16):
    """Clips by value at the upper end only."""

    # Contract, clip_gradients: "greatest global 2-norm (`"norm"`) or greatest absolute value (`"value"`)."
    # Large negative gradients pass: a run that is clipped so that it doesn't diverge still diverges, and positive
    # gradients alone are cut, which biases each step.

    own_alias = "one_sided_clip"

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        if algorithm != "value":
            return super().clip_gradients(optimizer, clip_val, algorithm)
        self.unscale_gradients(optimizer)
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                dense_gradient(parameter).clamp_(max=clip_val)
        return None


@caught_by("PRE-07")
class ConvertsPixelsPrecision(SameTrueBf16):
    """Converts integers too, but for the dtypes of labels that its author knew."""

    # Contract, convert_input: "labels and other integers are left unchanged, and so is a tensor that has the right
    # dtype."
    # Indices, tokens and labels in uint8, int16 or int8 arrive as bfloat16, which has 8 bits: those above 256 are
    # rounded to their neighbours, and a model that normalises or embeds them gets other values or an error.

    own_alias = "converts_pixels"

    def convert_input(self, batch: Any) -> Any:
        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.is_complex():
                return leaf
            return leaf if leaf.dtype in (torch.int64, torch.int32, torch.bool) else leaf.to(self.param_dtype)

        return map_tensors(batch, convert)


@caught_by("PRE-06")
class HighestAfterwardsPrecision(SameMixedBf16):
    """Leaves a step with torch's default for float32 products, not with what was set before."""

    # Contract, forward_context: "Leaving it restores what it changed, after an error too."
    # A program that has asked for torch.set_float32_matmul_precision("medium") computes with "highest" from the first
    # step on, and trains and evaluates slower and with other digits than it was told to.

    own_alias = "highest_afterwards"

    def forward_context(self) -> AbstractContextManager[Any]:
        return _Faster(super().forward_context())


class _Faster:
    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        torch.set_float32_matmul_precision("high")

    def __exit__(self, *error: Any) -> None:
        torch.set_float32_matmul_precision("highest")
        self._inner.__exit__(*error)


@caught_by("PRE-61")
class ForgottenGrowthPrecision(SameMixed16):
    """Saves the loss scale without the number of steps since it last changed."""

    # Contract, state_dict: "Return plain data that `load_state_dict` continues from, bit for bit."
    # A resumed run counts the steps to the next growth of the scale from zero: it grows later than in the run that was
    # never interrupted, gradients underflow or overflow at other steps, and the weights come apart.

    own_alias = "forgotten_growth"

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.scaler is None or not state:
            return state
        return {
            "scale": self.scaler.get_scale(),
            "growth_factor": self.scaler.get_growth_factor(),
            "backoff_factor": self.scaler.get_backoff_factor(),
            "growth_interval": self.scaler.get_growth_interval(),
            "_growth_tracker": 0,  # torch has no public function that returns it
        }


@caught_by("PRE-08")
class AlwaysFloat32OutputPrecision(SameMixedBf16):
    """Returns a step's output in float32, whatever torch's default dtype is."""

    # Contract, convert_output: "Return the step's output with its floating-point tensors in torch's default dtype."
    # A program that has set float64 as the default gets float32 losses and predictions: half of their digits are gone,
    # and sums with its own tensors are of mixed dtypes.

    own_alias = "always_float32_output"

    def convert_output(self, output: Any) -> Any:
        return cast_tensors(output, torch.float32)


@caught_by("PRE-29")
class UndeclaredScalingPrecision(SameMixed16):
    """Scales the loss and skips steps, and doesn't say so in its features."""

    # Contract, features: ""scales_loss"": `backward` scales the loss, and `unscale_gradients` undoes it and may skip a
    # step. A strategy whose ranks have different gradients, and would decide differently, refuses such a precision."
    # Such a strategy takes it: one rank skips a step that the others make, and the weights come apart. Hardware without
    # loss scaling isn't refused either.

    own_alias = "undeclared_scaling"

    def __init__(self) -> None:
        super().__init__()
        self.features = frozenset()
