"""Read the lists of other components' aliases with which classes of earlier releases said what they work with."""

from __future__ import annotations

import warnings
from typing import Any


class NameList:
    """A class attribute of an earlier release: a set of aliases, where a subclass still sets one.

    Reading it on a class that sets none returns ``default``, with a warning.

    Args:
        instead: what a class declares now, for the warning.
        default: the value from before.
    """

    def __init__(self, instead: str, default: frozenset[str] | None) -> None:
        self.instead, self.default = instead, default
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> frozenset[str] | None:
        warnings.warn(
            f"{owner.__qualname__}.{self.name} goes with torchhal 1.0: read {self.instead}", FutureWarning, stacklevel=2
        )
        return self.default


def warn_where_set(component: type, name: str) -> None:
    """Warn, when the class ``component`` is made, where it sets the :class:`NameList` ``name`` itself."""
    if name in vars(component):
        inherited = (vars(base).get(name) for base in component.__mro__[1:])
        declared = next(value for value in inherited if isinstance(value, NameList))
        warnings.warn(
            f"{component.__qualname__}.{name} names other components, and goes with torchhal 1.0: declare "
            f"{declared.instead}",
            FutureWarning,
            stacklevel=3,
        )


def list_of(component: object, name: str) -> frozenset[str] | None:
    """Return the list that ``component``, or its class, sets under ``name``; None where neither does."""
    for owner in (component, *type(component).__mro__):
        if name in vars(owner):
            value = vars(owner)[name]
            return None if isinstance(value, NameList) else value
    return None
