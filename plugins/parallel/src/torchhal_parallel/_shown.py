"""Format what a user's code has given for messages: tensors and arrays by their shapes."""

from __future__ import annotations

from typing import Any

from torchhal.pytree import map_tensors

_MOST = 200
"""Characters."""


class _Shape:
    def __init__(self, value: Any) -> None:
        self.text = f"<{type(value).__name__} of shape {tuple(value.shape)}>"

    def __repr__(self) -> str:
        return self.text


def shown(value: Any) -> str:
    """Return ``repr(value)`` with shapes in the places of tensors and arrays, and cut off where it is long."""
    text = repr(map_tensors(value, lambda leaf: _Shape(leaf) if hasattr(leaf, "shape") else leaf))
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


__all__ = ["shown"]
