"""MinMaxUInt8: each value of a chunk as one of 256 levels between the chunk's least and greatest.

The step between two levels is ``(greatest - least) / 255``; a value comes back at most half a step wrong, and a step
where it lies at the upper end, which is rounded to a level itself.
"""

from __future__ import annotations

import torch

LEVELS = 255.0
_EPS = 1e-7  # added to the range, so that a constant chunk has a scale


def compress(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., size) floating point to (..., 2) least and greatest, (..., size) uint8."""
    bounds = torch.stack(torch.aminmax(values.float(), dim=-1), dim=-1)
    scale, upper = _scale(bounds)
    levels = torch.minimum(torch.round(values.float() * scale), upper)
    return bounds, (levels - (upper - LEVELS)).nan_to_num(0.0).clamp(0, LEVELS).to(torch.uint8)


def decompress(bounds: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the values again, in float32. A chunk with a value that is not finite comes back as NaN throughout."""
    scale, upper = _scale(bounds)
    return (levels.float() + (upper - LEVELS)) / scale


def _scale(bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    least, greatest = bounds[..., :1], bounds[..., 1:]
    scale = LEVELS / (greatest - least + _EPS)
    return scale, torch.round(greatest * scale)
