"""Determine which hooks an object implements, once before a loop, so that no step calls an empty method."""

from __future__ import annotations

from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)

_DECLARING: set[type] = set()
"""Classes that name hooks, steps and loaders for others to define."""


def declares_hooks(cls: _Class) -> _Class:
    """Let the methods of ``cls`` count as missing where an object inherits them: a class decorator.

    For base classes, also of another library, that define every hook, step and loader of a model, a callback or a data
    module with a body that is empty, or raises. :func:`implements` looks at these classes; subclasses aren't among
    them.

    .. versionadded:: 0.2
    """
    _DECLARING.add(cls)
    return cls


def declares(cls: type) -> bool:
    """Return whether ``cls`` :func:`declares_hooks`, or is a base of a class that does."""
    return any(issubclass(each, cls) for each in _DECLARING)


def implements(instance: Any, name: str) -> bool:
    """Return whether ``instance`` has a body for the hook, step or loader ``name``.

    One that it inherits from a class which :func:`declares_hooks` is none. Objects of any other class have all that
    they define; a method may be set on the object itself.

    .. versionadded:: 0.2
    """
    if name in getattr(instance, "__dict__", {}):
        return callable(getattr(instance, name))
    own = getattr(type(instance), name, None)
    if any(own is vars(cls).get(name) for cls in _DECLARING) and own is not None:
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
