"""Convert hyperparameters to what JSON holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Return nested dicts and lists of str, int, float, bool and None; of anything else its text."""
    if type(value) in {bool, int, float, str, type(None)}:
        return value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy's or torch's
        return plain(value.item())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def flatten(value: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Return a dict without nested ones, whose names are joined; a list becomes its text."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= {f"{key}{separator}{name}": inner for name, inner in flatten(item, separator).items()}
        else:
            flat[key] = str(item) if isinstance(item, list | Mapping) else item
    return flat
