"""Print lines above what is drawn at the bottom of a terminal, by this process or another one.

What is drawn leaves the cursor on its first character. So any process of the job that has a line to print erases from
there to the end of the screen, however many lines that is, and prints in its place; the next drawing comes below.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

ERASE = "\r\x1b[J"
"""Control codes that erase from the start of the cursor's line to the end of the screen."""


def is_terminal(stream: Any) -> bool:
    """Return whether ``stream`` is a terminal that can move its cursor, unlike that of an editor."""
    is_a_tty = bool(getattr(stream, "isatty", lambda: False)())
    return is_a_tty and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def at_rest(lines: str) -> str:
    """Return ``lines`` with the control codes that put the cursor back on their first character."""
    above = lines.count("\n")
    return f"{lines}\x1b[{above}A\r" if above else f"{lines}\r"


class LinesAbove:
    """Text stream that writes whole lines above what is drawn; all other attributes are those of ``stream``.

    Args:
        stream: a terminal.
        drawn: returns what is drawn by this process, which is written again below the lines.
    """

    def __init__(self, stream: Any, drawn: Callable[[], str]) -> None:
        self._stream = stream
        self._drawn = drawn
        self._begun = ""
        """The beginning of a line, which is not written yet."""
        self._in_line = False
        """Whether a line is written whose end has not come."""

    def write(self, text: str) -> int:
        """Write the lines that end in ``text``, and keep what is left until its end or :meth:`flush` comes."""
        lines, newline, rest = (self._begun + text).rpartition("\n")
        self._begun = rest
        if newline:
            self._stream.write(f"{'' if self._in_line else ERASE}{lines}\n{self._drawn()}")
            self._stream.flush()
            self._in_line = False
        return len(text)

    def flush(self) -> None:
        """Write what is left too: the question of an ``input``, for example."""
        if self._begun:
            self._stream.write(f"{'' if self._in_line else ERASE}{self._begun}")
            self._begun, self._in_line = "", True
        self._stream.flush()

    def break_line(self) -> str:
        """Return the newline that a line without its end needs before something is drawn."""
        newline, self._in_line = "\n" if self._in_line else "", False
        return newline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class TerminalLines:
    """Replaces ``sys.stdout`` and ``sys.stderr`` by :class:`LinesAbove`, for logging handlers that have them too.

    One that is no terminal stays as it is.

    Args:
        drawn: returns what this process has drawn.
    """

    def __init__(self, drawn: Callable[[], str]) -> None:
        self._replaced: list[tuple[str, Any, LinesAbove]] = []
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None or not is_terminal(stream):
                continue
            above = LinesAbove(stream, drawn)
            self._replaced.append((name, stream, above))
            setattr(sys, name, above)
            for handler in _handlers_of(stream):
                self._handlers.append((handler, handler.setStream(above)))

    def break_line(self) -> str:
        """Return the newline that a line without its end needs before something is drawn."""
        return "".join(above.break_line() for _, _, above in self._replaced)

    def restore(self) -> None:
        """Put the streams back; one that was redirected since stays."""
        for name, stream, above in self._replaced:
            above.flush()
            if getattr(sys, name) is above:
                setattr(sys, name, stream)
        for handler, stream in self._handlers:
            if isinstance(handler.stream, LinesAbove):
                handler.setStream(stream)


def _handlers_of(stream: Any) -> Iterator[logging.StreamHandler[Any]]:
    """Yield the handlers that write to the file of ``stream``."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    own = _descriptor(stream)
    if own is not None:
        writers = [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
        yield from (handler for handler in writers if _descriptor(handler.stream) == own)


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None
