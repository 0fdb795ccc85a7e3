"""Check that a forward treats the samples of a batch independently, as one that runs for each microbatch has to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

BATCH_NORM = (
    "a pipeline runs the forward of {model} for each microbatch, and {name!r} is a batch norm: it normalizes with the "
    "statistics of {rows} samples at a time. Take a group or layer norm, fewer microbatches, or HybridStrategy("
    "pipeline=..., data=...) in its place if that is too few"
)

CHANGED_BUFFER = (
    "a training step of {model} changes the buffer {name!r}, and a pipeline runs the forward, and what the step does "
    "with its result, for each of the {microbatches} microbatches of a batch: it is changed as often, where one "
    "process changes it once. So a spectral norm takes {microbatches} power iterations for a batch, and a moving "
    "average moves as often. If it is to be changed once, do so in a hook such as on_train_batch_start, in place, or "
    "use a strategy under which each rank has the model, such as 'zero3'"
)


def batch_norm_in_training(module: nn.Module) -> str | None:
    """Return the name of the first batch norm whose statistics are those of what it is called with."""
    return next((name for name, each in module.named_modules() if isinstance(each, _BatchNorm) and each.training), None)


def has_own_statistics(module: nn.Module) -> bool:
    """Return whether a batch norm has statistics of what it is called with even in evaluation."""
    return any(isinstance(each, _BatchNorm) and each.running_mean is None for each in module.modules())


def buffer_versions(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return each buffer with how often it was changed in place, but for those of batch norms."""
    return {
        f"{path}.{name}" if path else name: (buffer, buffer._version)
        for path, owner in module.named_modules()
        if not isinstance(owner, _BatchNorm)
        for name, buffer in owner._buffers.items()
        if buffer is not None and not buffer.is_inference()  # which has no count
    }


def changed_more_than_once(
    before: dict[str, tuple[torch.Tensor, int]], after: dict[str, tuple[torch.Tensor, int]], microbatches: int
) -> str | None:
    """Return the first buffer that each of several microbatches has changed, or put another tensor in the place of."""
    for name, (buffer, version) in before.items():
        now, count = after.get(name, (None, 0))
        if microbatches > 1 and (now is not buffer or count - version >= microbatches):
            return name
    return None


def dependence(
    alone: Sequence[Sequence[torch.Tensor]], together: Sequence[torch.Tensor], *, rows: int, narrow: bool
) -> float | None:
    """Return how much a forward of some microbatches together differs from those of each, relative to its norm.

    None where it is as much as sums that are rounded in another order differ, or can't be compared.

    Args:
        alone: what was given for each microbatch, of ``rows`` samples.
        together: what was given for all of them.
        rows: samples of a microbatch.
        narrow: something was computed in 16 bits.
    """
    tolerance = 0.1 if narrow else 1e-3
    for index, whole in enumerate(together):
        parts = [values[index] for values in alone]
        one_per_sample = all(part.dim() and part.shape[0] == rows for part in parts)
        if not one_per_sample or not whole.is_floating_point() or whole.shape[0] != rows * len(parts):
            continue
        expected, joined = whole.double(), torch.cat(parts).double()
        difference = float((expected - joined).norm() / expected.norm().clamp(min=1e-6))
        if difference > tolerance:  # False for what isn't finite
            return difference
    return None
