"""Raise torchhal's errors as ones that are Lightning's too, for code that catches those."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torchhal.errors import ConfigurationError, ModelError
from torchhal_lightning import _trees as trees

_Function = TypeVar("_Function", bound=Callable[..., Any])

_made: dict[tuple[type, ...], type] = {}


def raising_lightnings(function: _Function) -> _Function:
    """Decorate a method so that a ConfigurationError, or a ModelError, is a MisconfigurationException as well."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ConfigurationError, ModelError) as error:
            error.__class__ = _both(type(error))
            raise

    return call  # type: ignore[return-value]


def _both(kind: type) -> type:
    theirs = tuple(dict.fromkeys(trees.classes("utilities.exceptions.MisconfigurationException")))
    theirs = tuple(cls for cls in theirs if not issubclass(kind, cls))
    if not theirs:
        return kind
    bases = (kind, *theirs)
    if bases not in _made:
        _made[bases] = type(kind.__name__, bases, {"__module__": kind.__module__})
    return _made[bases]
