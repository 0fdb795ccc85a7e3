"""Defective precisions: each differs from one of core's in one thing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from sound_components import SameMixed16, SameMixedBf16, SameTrueBf16
from torch import nn
from torch.optim import Optimizer
from zoo import caught_by


@caught_by("PRE-02")
class ModuleToPrecision(SameTrueBf16):
    """Converts the module by `module.to(dtype)`, which makes complex buffers real."""

    # "parameters stay the objects that they were, tied ones stay tied, and integer, boolean and complex buffers are
    # left unchanged."
    # The complex table of a rotary embedding, or of an FFT filter, loses its imaginary part: the model trains with
    # other positions than its author wrote, and all that says so is a warning of torch's.

    own_alias = "module_to"

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.to(self.param_dtype)


@caught_by("PRE-05")
class ResetDefaultPrecision(SameTrueBf16):
    """Sets torch's default dtype to float32 after each step, whatever it was before."""

    # "It can be entered again and inside of itself. Leaving it restores what it changed, after an error too."
    # A program that computes in float64 by torch.set_default_dtype continues in float32 after the first step; and a
    # step that runs another one inside makes float32 tensors after that, which the bfloat16 layers refuse.

    own_alias = "reset_default"

    def forward_context(self) -> AbstractContextManager[Any]:
        return _ThenFloat32(super().forward_context())


class _ThenFloat32:
    def __init__(self, step: AbstractContextManager[Any]) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._step.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._step.__exit__(*error)
        torch.set_default_dtype(torch.float32)


@caught_by("PRE-61")
class ScaleOnlyPrecision(SameMixed16):
    """Saves the scale of the loss, and not how many steps have passed since it grew."""

    # "Return plain data that `load_state_dict` continues from, bit for bit."
    # A resumed run doubles the scale at other steps than the run that wasn't interrupted: overflows skip other steps
    # from then on, and the two runs diverge. A job that is stopped more often than the scale grows never raises it.

    own_alias = "scale_only"

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "_growth_tracker": 0} if state else state


@caught_by("PRE-10")
class PerGroupClipPrecision(SameMixedBf16):
    """Clips the gradients of each parameter group by the norm of that group."""

    # "`clip_val`: greatest global 2-norm (`"norm"`)"
    # With one group with weight decay and one without, as most recipes have them, the groups are scaled by different
    # factors: the direction of the step changes, and its norm may exceed the limit by the root of their number.

    own_alias = "per_group_clip"

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        if algorithm != "norm" or len(optimizer.param_groups) == 1:
            return super().clip_gradients(optimizer, clip_val, algorithm)
        norms: list[Any] = []
        for group in optimizer.param_groups:
            alone: Any = SimpleNamespace(param_groups=[group])
            norms.append(super().clip_gradients(alone, clip_val, algorithm))
        return torch.linalg.vector_norm(torch.stack(norms))


@caught_by("PRE-14")
class AlwaysSteppedPrecision(SameMixed16):
    """Reports every optimizer step as made, those that the scaler has skipped too."""

    # "True if the parameters were updated, False if the step was skipped."
    # Learning-rate schedulers and weight averages advance though the weights didn't change: in the first steps, in
    # which the scale is found, a part of the warm-up is used up by steps that were never made.

    own_alias = "always_stepped"

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        super().optimizer_step(optimizer, closure)
        return True
