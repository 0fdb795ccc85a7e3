"""Refer to a Trainer without keeping it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weak_reference(trainer: Any) -> Callable[[], Any]:
    """Return a weak reference to ``trainer``, or a function that returns a stand-in.

    With a strong reference back, owner and Trainer would stay until a garbage collection.
    """
    try:
        return weakref.ref(trainer)
    except TypeError:  # None, or a stand-in
        return lambda: trainer


def trainer_of(owner: Any) -> Any:
    reference = owner.__dict__.get("_trainer")
    return None if reference is None else reference()
