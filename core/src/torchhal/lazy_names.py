"""Import the public names of a package when they are first used (PEP 562), and answer to names of earlier releases."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    module: str, homes: Mapping[str, str], *, renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package, or of a module some of whose names have changed.

    Args:
        module: its ``__name__``.
        homes: each public name -> the module that defines it, relative to the package: ``"cpu"``, or ``"._cpu"`` beside
            the package.
        renamed: names of earlier releases -> what they are called now; the first use in each place warns.
    """
    renamed = renamed or {}

    def __getattr__(name: str) -> Any:
        if name in renamed:
            warnings.warn(f"{module}.{name} is called {renamed[name]} now", DeprecationWarning, stacklevel=2)
            return getattr(sys.modules[module], renamed[name])
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{homes[name]}", module), name)
        setattr(sys.modules[module], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *homes})

    return __getattr__, __dir__
