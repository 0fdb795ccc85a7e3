"""Raise torchhal's errors as ones that are Lightning's too, for code that catches those.

Lightning raises MisconfigurationException for some mistakes and ValueError, TypeError or RuntimeError for others like
them; an error here is all that it may be there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torchhal.errors import AcceleratorUnavailableError, ConfigurationError, ModelError, PluginError
from torchhal_lightning import _trees as trees

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MISTAKES = (ConfigurationError, ModelError, PluginError, AcceleratorUnavailableError)

_BUILT_IN = (ValueError, RuntimeError, TypeError)

_made: dict[tuple[type, ...], type] = {}


def raising_lightnings(function: _Function) -> _Function:
    """Decorate a method so that an error of the arguments or the model is what Lightning raises as well."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _MISTAKES as error:
            pass_for(error, *trees.classes("utilities.exceptions.MisconfigurationException"), *_BUILT_IN)
            raise

    return call  # type: ignore[return-value]


class LoggedValueError(TypeError, ValueError):
    """A value that can't be logged, which Lightning refuses by a ValueError."""


def pass_for(error: Exception, *others: type) -> None:
    """Give ``error`` a class of its own name that is a subclass of ``others`` too."""
    kind = type(error)
    bases = (kind, *(cls for cls in dict.fromkeys(others) if not issubclass(kind, cls)))
    if len(bases) == 1:
        return
    if bases not in _made:
        _made[bases] = type(kind.__name__, bases, {"__module__": kind.__module__})
    error.__class__ = _made[bases]
