"""Texts of errors that a component raises, which may be megabytes long or fail to be made."""

from __future__ import annotations

from typing import Final

LINE: Final = 1_000
"""Characters of a line that are kept."""
_TEXT: Final = 10_000
"""Characters of a text that are kept: reports are read by people and sent over pipes."""


def with_article(name: str) -> str:
    """Return ``name`` behind "a" or "an"."""
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def first_line(error: BaseException) -> str:
    """Return ``CLASS: MESSAGE`` with the first line of the message."""
    lines = text_of(error).strip().splitlines()
    return f"{type(error).__name__}: {shortened(lines[0], LINE)}" if lines else type(error).__name__


def text_of(error: BaseException) -> str:
    """Return the message of ``error``, shortened; one whose ``__str__`` raises has none, and that is its message."""
    try:
        return shortened(str(error))
    except Exception as other:
        return f"(its __str__ raises {type(other).__name__})"


def shortened(text: str, length: int = _TEXT) -> str:
    """Return the first ``length`` characters of ``text``, and how many more there are."""
    return text if len(text) <= length else f"{text[:length]} ... ({len(text) - length} characters left out)"
