"""Compare what an exported file computes with what the module does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from torchhal.errors import ModelError
from torchhal.export._example_input import COMPARED_SIZES, EXAMPLE_SIZE, ExampleInput, run

TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Dtype of an output -> the difference that kernels of another order of summation make, as a share of its largest value
or of 1. A wrong graph differs by more."""


def compare(
    module: nn.Module, inputs: ExampleInput, compute: Callable[..., list[torch.Tensor]], what: str
) -> tuple[float, tuple[int, ...]]:
    """Return the largest absolute difference between outputs, and the batch sizes at which it was looked for.

    Args:
        module: the original, in evaluation mode.
        inputs: of its ``forward``.
        compute: returns the output tensors of the file for the same arguments.
        what: name of the file's format.

    Raises:
        ModelError: the file can't be run, or computes something else.
    """
    sizes = COMPARED_SIZES if inputs.dynamic_batch else (EXAMPLE_SIZE,)
    largest = 0.0
    for size in sizes:
        expected = run(module, inputs, size)
        arguments, keywords = inputs.at(size)
        at = f"for a batch of {size}" if inputs.dynamic_batch else f"for {inputs}"
        name = type(module).__name__
        try:
            with torch.no_grad():
                computed = compute(*arguments, **keywords)
        except Exception as error:
            raise ModelError(
                f"{name} as {what} can't be run {at} ({type(error).__name__}: {_first_line(error)}): its forward "
                f"depends on the size {EXAMPLE_SIZE} of the batch it was exported with. Take sizes from the input, as "
                "x.shape[0], or export with fixed shapes: dynamic_batch=False, --fixed-shapes"
            ) from error
        largest = max(largest, _difference(name, expected, computed, f"as {what} {at}"))
    return largest, sizes if inputs.dynamic_batch else ()


def _difference(name: str, expected: list[torch.Tensor], computed: list[torch.Tensor], where: str) -> float:
    shapes = [[(str(each.dtype).removeprefix("torch."), *each.shape) for each in some] for some in (expected, computed)]
    if shapes[0] != shapes[1]:
        raise ModelError(f"{name} {where} returns {shapes[1]}, and the module {shapes[0]}: not exported")
    largest = 0.0
    for index, (one, other) in enumerate(zip(expected, computed, strict=True)):
        wide = torch.complex128 if one.is_complex() else torch.float64
        one, other = one.to(wide), other.to(wide)
        gap = (one - other).abs()
        gap[(one == other) | (one.isnan() & other.isnan())] = 0.0  # infinities and NaN in both
        difference = float(gap.max()) if gap.numel() else 0.0
        finite = one[one.isfinite()].abs()
        scale = max(1.0, float(finite.max()) if finite.numel() else 0.0)
        allowed = TOLERANCE.get(expected[index].dtype, 0.0) * scale
        if not difference <= allowed:
            raise ModelError(
                f"{name} {where} differs from the module by {difference:.3g} in output {index}, of values up to "
                f"{scale:.3g}, so it was not exported. A forward that draws random numbers in evaluation mode, or that "
                "branches on values, can't be exported"
            )
        largest = max(largest, difference)
    return largest


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
