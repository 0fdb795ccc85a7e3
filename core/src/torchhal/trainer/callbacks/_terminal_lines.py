"""Print lines above what is drawn at the bottom of a terminal, by this process or another one.

What is drawn leaves the cursor on its first character. So any process of the job that has a line to print erases from
there to the end of the screen, however many lines that is, and prints in its place; the next drawing comes below.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

ERASE = "\r\x1b[J\r"
"""Control codes that erase from the start of the cursor's line to the end of the screen.

The second return is for programs that read a recorded terminal by lines."""


def is_terminal(stream: Any) -> bool:
    """Return whether ``stream`` is a terminal that can move its cursor, unlike that of an editor."""
    is_a_tty = bool(getattr(stream, "isatty", lambda: False)())
    return is_a_tty and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def at_rest(lines: str) -> str:
    """Return ``lines`` with the control codes that put the cursor back on their first character."""
    above = lines.count("\n")
    return f"{lines}\x1b[{above}A\r" if above else f"{lines}\r" if lines else ""


class LinesAbove:
    """Text stream that writes whole lines above what is drawn; all other attributes are those of ``stream``.

    Args:
        stream: a terminal.
        drawn: returns what is drawn by this process, which is written again below the lines.
    """

    def __init__(self, stream: Any, drawn: Callable[[], str]) -> None:
        self._stream = stream
        self._drawn = drawn
        self._process = os.getpid()
        self._begun = ""
        """The beginning of a line, which is not written yet."""
        self._in_line = False
        """Whether a line is written whose end has not come."""
        self._is_closed = False
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write the lines that end in ``text``, and keep what is left until its end or :meth:`flush` comes."""
        if self._is_closed:
            return int(self._stream.write(text))
        with self._locked() as is_own:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline:
                self._stream.write(f"{self._start()}{lines}\n{self._drawn() if is_own else ''}")
                self._stream.flush()
                self._in_line = False
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines``, which have their ends."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is left too: the question of an ``input``, for example."""
        with self._locked():
            if self._begun:
                self._stream.write(self._start() + self._begun)
                self._begun, self._in_line = "", True
            self._stream.flush()

    def begin(self) -> None:
        """End a line whose end has not come, before something is drawn."""
        with self._locked():
            if self._in_line:
                self._stream.write("\n")
                self._in_line = False

    def close(self) -> None:
        """Write what is left, and from now on everything as it comes."""
        self.flush()
        self._is_closed = True

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Keep other threads from writing, and yield whether this is the process that draws.

        A worker of a loader is a fork of it, in which a thread that holds the lock doesn't exist.
        """
        if os.getpid() != self._process:
            yield False
            return
        with self._lock:
            yield True

    def _start(self) -> str:
        return "" if self._in_line else ERASE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Drawing:
    """Text stream that keeps what is written until :meth:`emit`; all other attributes are those of ``stream``.

    A drawing of several writes would be torn by a line of another process in between.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._written: list[str] = []

    def write(self, text: str) -> int:
        """Keep ``text``."""
        self._written.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing."""

    def emit(self) -> None:
        """Write all in one piece, and put the cursor at the start of its line."""
        if self._written:
            self._stream.write("".join([*self._written, "\r"]))
            self._stream.flush()
            self._written.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class TerminalLines:
    """Replaces ``sys.stdout`` and ``sys.stderr`` by :class:`LinesAbove`, for logging handlers that have them too.

    One that is no terminal stays as it is.

    Args:
        drawn: returns what this process has drawn.
    """

    def __init__(self, drawn: Callable[[], str]) -> None:
        self.drawing = Drawing(sys.stderr)
        """The stream to draw on."""
        self._replaced: list[tuple[str, Any, LinesAbove]] = []
        self._handlers: list[tuple[logging.StreamHandler[Any], Any, LinesAbove]] = []
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None or not is_terminal(stream):
                continue
            above = LinesAbove(stream, drawn)
            self._replaced.append((name, stream, above))
            setattr(sys, name, above)
            self._handlers += [(each, each.setStream(above), above) for each in _handlers_of(stream)]

    def begin(self) -> None:
        """End lines whose ends have not come, before something is drawn."""
        for _, _, above in self._replaced:
            above.begin()

    def restore(self) -> None:
        """Put the streams back; one that was redirected since stays."""
        for name, stream, above in self._replaced:
            above.close()
            if getattr(sys, name) is above:
                setattr(sys, name, stream)
        for handler, stream, above in reversed(self._handlers):
            if handler.stream is above:
                handler.setStream(stream)


def _handlers_of(stream: Any) -> list[logging.StreamHandler[Any]]:
    """Return the handlers that write to the file of ``stream``."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    own = _descriptor(stream)
    return [
        handler
        for handler in handlers
        if isinstance(handler, logging.StreamHandler) and own is not None and _descriptor(handler.stream) == own
    ]


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None
