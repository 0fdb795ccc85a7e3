"""Bagua for torchhal: strategy ``bagua``. Importing this package imports neither torch nor Bagua."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal_bagua.strategy import BaguaStrategy

__version__ = "0.1.0"

__all__ = ["BaguaStrategy"]


def __getattr__(name: str) -> Any:
    if name != "BaguaStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchhal_bagua.strategy import BaguaStrategy

    return BaguaStrategy
