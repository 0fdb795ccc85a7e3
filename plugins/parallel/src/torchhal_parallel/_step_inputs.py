"""Check what a step calls the model with, where the stages of a pipeline run it microbatch by microbatch."""

from __future__ import annotations

from typing import Any

import torch

from torchhal.errors import ModelError
from torchhal.pytree import map_tensors
from torchhal_parallel._attribute_reads import PLAIN
from torchhal_parallel._microbatches import indivisible
from torchhal_parallel._shown import shown


def split_arguments(
    arguments: dict[str, Any], microbatches: int, model: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
    """Return (tensors, other arguments, batch size) of a call of ``model``.

    Raises:
        ModelError: a stage could not be called with one of them, or ``microbatches`` don't divide the batch.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in arguments.items() if name not in tensors}
    if bad := [name for name, value in others.items() if not isinstance(value, PLAIN)]:
        raise ModelError(
            f"a pipeline passes tensors from stage to stage, and the step calls {model} with {bad[0]}="
            f"{shown(others[bad[0]])}: give it tensors, numbers, strings, flags and None"
        )
    if trained := [name for name, tensor in tensors.items() if tensor.requires_grad]:
        raise ModelError(
            f"the step calls {model} with {trained[0]!r}, which requires a gradient, and a pipeline has none for "
            "what the model is called with: the layers are on several ranks. A gradient penalty, or another use of "
            "torch.autograd.grad with respect to inputs, needs a strategy under which each rank has the model, "
            "such as 'ddp' or 'zero3'; otherwise call self(x.detach())"
        )
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors.values()}
    if len(sizes) != 1 or None in sizes:
        raise ModelError(f"all tensors that {model} is called with must be of one batch size (got {sizes})")
    size = int(sizes.pop())  # type: ignore[arg-type]
    if size % microbatches:
        raise indivisible("a batch", size, microbatches)
    return tensors, others, size


def check_same_size(batch: Any, size: int, model: str) -> None:
    """Raise ModelError if no tensor of ``batch`` has ``size`` samples, with which the step calls ``model``."""
    found = _first_dimensions(batch)
    if size not in found:
        raise ModelError(
            f"the step calls {model} with {size} samples, and the tensors of its batch have "
            f"{', '.join(map(str, sorted(found))) or 'no dimensions'}: a pipeline divides both into the same "
            "microbatches. Make the batch in the data set or its collate_fn what the model is to be called with, "
            "or set schedule='gpipe', under which the step runs once for the batch"
        )


def _first_dimensions(batch: Any) -> set[int]:
    found: set[int] = set()

    def add(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            found.add(leaf.shape[0])
        return leaf

    map_tensors(batch, add)
    return found
