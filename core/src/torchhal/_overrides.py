"""Determine which hooks an object implements, once before a loop, so that no step calls an empty method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)

_DECLARING: dict[type, frozenset[str]] = {}
"""Classes that name hooks, steps and loaders for others to define, each with the names whose bodies count."""

_FRAMEWORKS = {"torchhal"}
"""Packages whose classes define hooks to override; their names are not users' mistakes."""


def declares_hooks(cls: _Class, *, but: Iterable[str] = ()) -> _Class:
    """Let the methods of ``cls`` count as missing where an object inherits them: a class decorator.

    For base classes, also of another library, that define every hook, step and loader of a model, a callback or a data
    module with a body that is empty, or raises. :func:`implements` looks at these classes; subclasses aren't among
    them.

    Args:
        cls: the base class.
        but: names of methods that have a body for those that define none.

    .. versionadded:: 0.2
    """
    _DECLARING[cls] = frozenset(but)
    return cls


def note_framework(cls: type) -> None:
    """Take note of the packages of those bases of ``cls``, of an adapted object, that :func:`declares_hooks`."""
    _FRAMEWORKS.update(each.__module__.partition(".")[0] for each in cls.__mro__ if each in _DECLARING)


def is_of_framework(cls: type) -> bool:
    """Return whether ``cls`` comes from torchhal or an adapted framework, or is a base of one that declares hooks."""
    return cls.__module__.partition(".")[0] in _FRAMEWORKS or any(issubclass(each, cls) for each in _DECLARING)


def implements(instance: Any, name: str) -> bool:
    """Return whether ``instance`` has a body for the hook, step or loader ``name``.

    One that it inherits from a class which :func:`declares_hooks` is none. Objects of any other class have all that
    they define; a method may be set on the object itself.

    .. versionadded:: 0.2
    """
    if name in getattr(instance, "__dict__", {}):
        return callable(getattr(instance, name))
    own = getattr(type(instance), name, None)
    if own is not None and any(own is vars(cls).get(name) and name not in but for cls, but in _DECLARING.items()):
        return False
    return callable(getattr(instance, name, None))


def overrides(instance: Any, base: type, name: str) -> bool:
    """Return whether ``instance`` has a body of its own for ``name`` rather than the one of ``base``.

    Works for subclasses, for duck-typed objects not derived from ``base`` (they override all that they
    define) and for a method set on the instance itself.
    """
    if name in getattr(instance, "__dict__", {}):
        return True
    own = getattr(type(instance), name, None)
    return own is not None and own is not getattr(base, name, None)
