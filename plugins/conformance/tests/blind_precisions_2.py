"""Blind defects: four precisions with one mistake each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary
from zoo import caught_by

from torchhal.accelerators import Accelerator
from torchhal.precision import MixedPrecision, TruePrecision
from torchhal.pytree import map_tensors


@caught_by("PRE-62")
class CachedInputPrecision(TruePrecision):
    """``convert_input`` keeps what it has converted by tensor object: one that is filled anew gives the old values."""

    # docs/reference/precision.md, convert_input: "Return `batch` with its floating-point tensors in the dtype of the
    # model's input."
    # A loader that fills one tensor with each batch (a ring of pinned buffers, a recycled observation)
    # trains on its first batch for ever, and the loss of that goes down well.

    def __init__(self) -> None:
        super().__init__("bfloat16")
        self._converted: Any = None

    def convert_input(self, batch: Any) -> Any:
        return map_tensors(batch, self._convert)

    def _convert(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dtype is self.param_dtype:
            return leaf
        if leaf.requires_grad or torch.is_inference_mode_enabled():  # a graph of its own, or not for training
            return leaf.to(self.param_dtype)
        if self._converted is None:
            self._converted = WeakTensorKeyDictionary()
        converted = self._converted.get(leaf)
        if converted is None:
            converted = self._converted[leaf] = leaf.to(self.param_dtype)
        return converted

    def teardown(self) -> None:
        self._converted = None
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_converted": None}


@caught_by("PRE-63")
class AbandonedStepPrecision(MixedPrecision):
    """What is unscaled is forgotten by ``optimizer_step`` alone: after a step that was given up the next isn't."""

    # docs/reference/precision.md, unscale_gradients: "Divide the gradients of `optimizer` by the loss scale, once per
    # step however often it is called.", and clip_gradients: "Clip the unscaled gradients of `optimizer` in place."
    # A hook looks at the unscaled norm, finds a spike and leaves the step out (zero_grad, no step). The next step is
    # clipped by the norm of its scaled gradients, so that its update is a 65536th of what it should be.

    def __init__(self) -> None:
        super().__init__("float16")
        self._done: set[int] = set()

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._done:
            return
        super().unscale_gradients(optimizer)
        if id(optimizer) in self._unscaled:
            self._done.add(id(optimizer))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        try:
            stepped = super().optimizer_step(optimizer, closure)
        finally:
            self._done.discard(id(optimizer))
        if id(optimizer) in self._stepped:
            self._unscaled[id(optimizer)] = optimizer  # at the latest by the scaler's own step
        return stepped

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._done.clear()

    def teardown(self) -> None:
        super().teardown()
        self._done.clear()


@caught_by("PRE-60")
class FirstLifesSwitchPrecision(TruePrecision):
    """``setup`` keeps the user's matmul precision in its first life only, and every ``teardown`` restores that one."""

    # docs/reference/precision.md, teardown: "Undo every global change, to what was set before `setup`: default dtype,
    # matmul precision, patches."
    # A second fit with the same object: the matmul precision that the user has chosen between the two runs is gone
    # after it, so that the third run computes products in another width than was asked for.

    def __init__(self) -> None:
        super().__init__("bfloat16")
        self._before: str | None = None
        self._is_set_up = False

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        super().setup(accelerator, device)
        if self._before is None:
            self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # what stays float32, such as a loss, is computed exactly
        self._is_set_up = True

    def teardown(self) -> None:
        if self._is_set_up and self._before is not None:
            torch.set_float32_matmul_precision(self._before)
        self._is_set_up = False
        super().teardown()


class _HalfAutocast:
    """Autocast on the CPU, by torch's own switches; it may be entered again while it is entered."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        self._kind, self._dtype = kind, dtype
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(torch.is_autocast_enabled(self._kind))
        torch.set_autocast_dtype(self._kind, self._dtype)
        torch.set_autocast_enabled(self._kind, True)
        torch.autocast_increment_nesting()

    def __exit__(self, *error: object) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(self._kind, self._before.pop())


@caught_by("PRE-05")
class AutocastDtypeStaysPrecision(MixedPrecision):
    """``forward_context`` restores whether autocast is on, and not the dtype to which it casts."""

    # docs/reference/precision.md, forward_context: "Leaving it restores what it changed, after an error too."
    # After the run torch.autocast("cpu") of the program, which is bfloat16 by default, casts to float16: numbers above
    # 65504 are infinite in code that has nothing to do with the run, or in the run's own regions of autocast.

    def __init__(self) -> None:
        super().__init__("float16")

    def forward_context(self) -> AbstractContextManager[Any]:
        if self._device_type is None:
            raise RuntimeError(f"setup() must come before forward_context() of precision {self.alias!r}")
        return _HalfAutocast(self._device_type, self.compute_dtype)
