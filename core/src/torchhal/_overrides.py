"""Determine which hooks an object overrides, once before a loop, so that no step calls an empty method."""

from __future__ import annotations

from typing import Any


def overrides(instance: Any, base: type, name: str) -> bool:
    """Return whether ``instance`` has a body of its own for ``name`` rather than the one of ``base``.

    Works for subclasses, for duck-typed objects not derived from ``base`` (they override all that they
    define) and for a method set on the instance itself.
    """
    if name in getattr(instance, "__dict__", {}):
        return True
    own = getattr(type(instance), name, None)
    return own is not None and own is not getattr(base, name, None)
