"""Read arguments of the Trainer that are not given from variables, ``PL_TRAINER_MAX_EPOCHS=3``."""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def defaults_from_variables(init: _Function) -> _Function:
    """Decorate a constructor: a variable is the default of the argument that it names; values are Python's literals."""
    names = inspect.signature(init).parameters

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        prefix = f"PL_{type(self).__name__.upper()}_"
        for name in names:
            text = os.environ.get(prefix + name.upper())
            if text is not None and name not in kwargs:
                kwargs[name] = _literal(text)
        return init(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
