"""Text for a terminal, without what a terminal would act upon: a plugin's names and reasons are other people's text."""

from __future__ import annotations

from typing import Final

_SPACES: Final = "\t\u00a0\u202f\u2009\u3000"  # not printable to Python, and harmless


def printable(text: str) -> str:
    """Return ``text`` with its control characters as escapes: newlines, cursor movements, changes of direction."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in _SPACES else char.encode("unicode_escape").decode() for char in text
    )


def echo(text: str) -> None:
    """Print ``text`` with each line made printable."""
    print("\n".join(map(printable, text.split("\n"))))
