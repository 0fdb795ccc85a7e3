"""Find the floating-point tensors of a nest, which are what ranks with weights of their own average."""

from __future__ import annotations

from typing import Any

import torch

from torchhal.pytree import map_tensors


def floating_tensors(nest: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of a nest, in its order."""
    found: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if is_floating(leaf):
            found.append(leaf)
        return leaf

    map_tensors(nest, collect)
    return found


def is_floating(leaf: Any) -> bool:
    """Return True for a tensor of a floating-point dtype."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
