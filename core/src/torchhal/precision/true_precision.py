"""Define precisions with one dtype for parameters and arithmetic: 32-true, 64-true, bf16-true, 16-true."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.precision._casting import DefaultDtype, cast_module, cast_tensors, parse_dtype, widen_tensors
from torchhal.precision.base import Precision, needs_closure

_ALIASES: Final = {torch.float64: "64-true", torch.bfloat16: "bf16-true", torch.float16: "16-true"}


class SinglePrecision(Precision):
    """``32-true``: torch's own default, used when no precision is named.

    It changes nothing at all: a model that its author made float64, or loaded in bfloat16, stays so, as in plain
    torch. Every method is the contract's identity, so a loop that looks up the overridden ones calls none.
    """


class TruePrecision(Precision):
    """One dtype other than float32 for everything: parameters, inputs and what a step creates by itself.

    Args:
        dtype: ``"float64"``, ``"bfloat16"`` or ``"float16"``, or the ``torch.dtype``. The alias follows from it.

    There is no loss scaling here, float16 included; see :class:`torchhal.precision.MixedPrecision` for that.
    """

    def __init__(self, dtype: str | torch.dtype) -> None:
        if dtype in ("float32", torch.float32):
            raise ValueError(
                "'dtype' must not be float32: '32-true' is torchhal.precision.SinglePrecision(), which converts "
                f"nothing (got {dtype!r})"
            )
        self.param_dtype = self.compute_dtype = parse_dtype(dtype, _ALIASES)
        self.alias = _ALIASES[self.param_dtype]
        self._default_dtype = DefaultDtype(self.param_dtype)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse, for float16, optimizers that evaluate a closure: LBFGS divides by differences that vanish there."""
        if self.param_dtype is torch.float16 and needs_closure(optimizer):
            raise TypeError(
                f"precision {self.alias!r} doesn't work with optimizer {type(optimizer).__name__}: it divides by "
                "differences of gradients, which vanish in float16, and the weights become NaN; use 'bf16-true' or "
                "'32-true', or another optimizer"
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast floating-point parameters and buffers; int, bool and complex ones stay.

        Checks: PRE-02, PRE-03.
        """
        return cast_module(module, self.param_dtype)

    def convert_input(self, batch: Any) -> Any:
        return cast_tensors(batch, self.param_dtype)

    def convert_output(self, output: Any) -> Any:
        """Cast what is narrower to the default dtype outside :meth:`forward_context`, also when called inside it.

        Checks: PRE-08.
        """
        return widen_tensors(output, self._default_dtype.outside)

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._default_dtype

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors that a step creates by itself get the model's dtype.

        ``torch.zeros(n)`` in a step is float32 otherwise, a sum with it is promoted to float32 (or, under 64-true,
        keeps float32's digits), and the next layer raises: 'mat1 and mat2 must have the same dtype'. The default
        dtype belongs to the process, not to the thread: other threads see it for as long as a step runs.
        """
        return self._default_dtype

    def teardown(self) -> None:
        self._default_dtype.restore()
