"""Warn once about a class attribute that another one replaces, where a plugin's class still sets it."""

from __future__ import annotations

import sys
import warnings

_NOT_THE_AUTHORS = ("torchhal.", "abc")


def warn_replaced(cls: type, attribute: str, instead: str) -> None:
    """Warn that ``cls`` sets ``attribute``; called while the class is created, so once for each class.

    The warning points to the class statement, past the frames of core and of ``abc``, whose metaclass is Python code.

    Args:
        cls: the class that is being created.
        attribute: name of the attribute that is replaced.
        instead: what to declare in its place.
    """
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_NOT_THE_AUTHORS):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"{cls.__qualname__}.{attribute} is replaced: {instead}. It acts as before until torchhal 1.0",
        FutureWarning,
        stacklevel=level,
    )
