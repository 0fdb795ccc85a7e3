"""Precisions that differ from core's in one defect each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from sound_components import SameMixed16, SameMixedBf16, SameTrueBf16
from torch.optim import Optimizer
from zoo import caught_by

from torchhal.accelerators import Accelerator
from torchhal.pytree import map_tensors


@caught_by("PRE-07")
class HalfInputKeptPrecision(SameTrueBf16):
    """It converts float32 and float64 inputs and leaves those of half width as they are."""

    # "Return `batch` with its floating-point tensors in the dtype of the model's input."
    # A data set that is stored in float16, as features and latents often are, meets bfloat16 weights: the first layer
    # raises that two dtypes differ, though the precision was to take care of that.

    own_alias = "half_input_kept"

    def convert_input(self, batch: Any) -> Any:
        def cast(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float32, torch.float64):
                return leaf.to(self.param_dtype)
            return leaf

        return map_tensors(batch, cast)


@caught_by("PRE-24")
class LeftAutocastDtypePrecision(SameMixed16):
    """It makes its dtype that of every autocast without one, and doesn't take it back."""

    # "Undo every global change, to what was set before `setup`: default dtype, matmul precision, patches."
    # After the fit a plain `torch.autocast("cpu")` elsewhere in the program computes in float16 where it computed in
    # bfloat16: sums overflow to infinity that were finite before.

    own_alias = "left_autocast_dtype"

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        super().setup(accelerator, device)
        torch.set_autocast_dtype(accelerator.device_type, self.compute_dtype)  # for autocasts inside the model


@caught_by("PRE-21")
class OneFlagPrecision(SameMixed16):
    """In one step it unscales the gradients of the first optimizer that asks, and of no other."""

    # "Divide the gradients of `optimizer` by the loss scale, once per step however often it is called."
    # With two optimizers after one backward, the second one's gradients are clipped while they are 65536 times too
    # large and divided afterwards: its part of the model hardly moves, and its logged norm is wrong.

    own_alias = "one_flag"

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self._unscaled:  # done in this step
            return
        super().unscale_gradients(optimizer)


@caught_by("PRE-23")
class TrainingOnlyAutocastPrecision(SameMixedBf16):
    """Its context for a step without gradients enters no autocast."""

    # "Return a context for one training, validation, test or predict step."
    # Validation runs in float32, twice as slow and in twice the memory, and measures another arithmetic than that which
    # is trained and shipped; a frozen backbone in bfloat16, which training takes, raises in it.

    own_alias = "training_only_autocast"

    def forward_context(self) -> AbstractContextManager[Any]:
        context = super().forward_context()
        return context if torch.is_grad_enabled() else nullcontext()


@caught_by("PRE-09")
class DroppedInputsPrecision(SameMixedBf16):
    """Of the keywords of a backward it passes on those that it knows, and drops `inputs`."""

    # "`**kwargs`: passed on to the backward function."
    # `manual_backward(loss, inputs=list(generator.parameters()))` fills the discriminator's gradients too, and its
    # next step trains it on the generator's loss, in silence.

    own_alias = "dropped_inputs"

    def backward(
        self, loss: torch.Tensor, *args: Any, through: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        if through is None:
            known = ("gradient", "retain_graph", "create_graph")
            kwargs = {name: kwargs[name] for name in known if name in kwargs}
        super().backward(loss, *args, through=through, **kwargs)
