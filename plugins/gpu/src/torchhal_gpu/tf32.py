"""Compute float32 products with 10 bits of mantissa, TensorFloat-32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchhal.accelerators import Accelerator
from torchhal.capabilities import TF32
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import Precision


class TF32Precision(Precision):
    """``tf32``: weights, inputs and sums stay float32, matrix products and convolutions use TensorFloat-32.

    Some 8 times the throughput of float32 on an NVIDIA GPU since Ampere (compute capability 8.0), for a relative error
    of about 1e-3 in each product. The switches are the process's; :meth:`teardown` puts them back. Source: NVIDIA
    A100 whitepaper, and torch's notes on numerical accuracy.
    """

    alias = "tf32"
    needs: frozenset[str] = Precision.needs | {TF32}

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        """Switch TensorFloat-32 on in this process.

        Raises:
            UnsupportedCombinationError: the device has no TensorFloat-32.
        """
        if not torch.cuda.is_tf32_supported():
            raise UnsupportedCombinationError(
                f"precision 'tf32' doesn't fit {device}: TensorFloat-32 needs an NVIDIA GPU of compute capability 8.0 "
                "or newer; use '32-true'"
            )
        self.teardown()
        cudnn = torch.backends.cudnn
        switches: list[tuple[Any, str, Any]] = [(cudnn, "allow_tf32", True)]
        if hasattr(cudnn, "conv"):  # since torch 2.9 each operator has its own, and the old ones may raise
            switches = [(operator, "fp32_precision", "tf32") for operator in (cudnn.conv, cudnn.rnn)]
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # somebody has set matmul's own switch, after which torch no longer tells the general one
            switches.append((torch.backends.cuda.matmul, "fp32_precision", "tf32"))
        else:  # the general one: with matmul's own set, torch couldn't tell it to libraries that ask
            torch.set_float32_matmul_precision("high")
            self._undo.append(partial(torch.set_float32_matmul_precision, before))
        for owner, name, value in switches:
            self._undo.append(partial(setattr, owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def teardown(self) -> None:
        while self._undo:
            self._undo.pop()()
