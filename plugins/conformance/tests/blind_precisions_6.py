"""Precisions that differ from core's in one mistake each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from sound_components import SameMixed16, SameMixedBf16
from torch import nn
from torch.optim import Optimizer
from zoo import caught_by

from torchhal.accelerators import Accelerator


@caught_by("PRE-10")
class PerGroupClipPrecision(SameMixedBf16):
    """Clipping by norm clips the gradients of each parameter group by themselves."""

    # Contract, clip_gradients: 'clip_val: greatest global 2-norm (`"norm"`)'.
    # With several groups, as for weight decay or a lower learning rate of the backbone, the norm of all gradients may
    # be above the bound, and their direction changes: the model trains in another way than the user asked for.

    own_alias = "per_group_clip"

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        if algorithm != "norm" or any(p.grad is not None and p.grad.is_sparse for p in self.main_params(optimizer)):
            return super().clip_gradients(optimizer, clip_val, algorithm)
        self.unscale_gradients(optimizer)
        norms = [nn.utils.clip_grad_norm_(group["params"], clip_val) for group in optimizer.param_groups]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        return total


@caught_by("PRE-16")
class ScaleMattersOnlyPrecision(SameMixed16):
    """A loaded state sets the loss scale, while the count of good steps since its last change begins at zero."""

    # Contract, state_dict: "Return plain data that `load_state_dict` continues from, bit for bit."
    # The scale of a continued run grows up to 2000 steps later than that of one without a break: other steps are
    # skipped, other gradients underflow, and the two don't end with the same weights.

    own_alias = "scale_matters_only"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "_growth_tracker": 0} if state else state)


@caught_by("PRE-29")
class HighestAfterwardsPrecision(SameMixedBf16):
    """The matmul precision, which ``setup`` lowers, is set to torch's default by ``teardown``."""

    # Contract, teardown: "Undo every global change, to what was set before `setup`: default dtype, matmul precision,
    # patches."
    # A program that had chosen "high" or "medium" for all of its own matmuls runs at "highest" after the first fit,
    # several times slower on the hardware, with other digits and without a word.

    own_alias = "highest_afterwards"

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        super().setup(accelerator, device)
        torch.set_float32_matmul_precision("high")

    def teardown(self) -> None:
        torch.set_float32_matmul_precision("highest")
        super().teardown()


@caught_by("PRE-06")
class OneContextPrecision(SameMixedBf16):
    """``forward_context`` returns one ``torch.autocast``, made in ``setup``, to spare each step a new one."""

    # Contract, forward_context: "It can be entered again and inside of itself. Leaving it restores what it changed,
    # after an error too."
    # The object remembers the state of before its latest entry only. Entered inside of itself, it leaves autocast on
    # when the outer one is left: the optimizer, metrics and the rest of the program compute in bfloat16.

    own_alias = "one_context"

    def __init__(self) -> None:
        super().__init__()
        self._context: torch.autocast | None = None

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        super().setup(accelerator, device)
        self._context = torch.autocast(accelerator.device_type, self.compute_dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        return super().forward_context() if self._context is None else self._context


@caught_by("PRE-09")
class OwnBackwardPrecision(SameMixedBf16):
    """``backward`` always calls that of the loss, in float32, and never the function that it is given for it."""

    # Contract, backward: "through: a function to call with the (scaled) loss and the other arguments in place of
    # `loss.backward`, such as a model's own `backward`."
    # A model's own backward, which may add a penalty, keep the graph or treat some gradients, is never called: it
    # trains without that, and nothing says so.

    own_alias = "own_backward"

    def backward(
        self, loss: torch.Tensor, *args: Any, through: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        super().backward(loss.float() if loss.dtype is self.compute_dtype else loss, *args, **kwargs)
