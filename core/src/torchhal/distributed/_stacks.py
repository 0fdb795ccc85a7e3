"""Format the stacks of the threads of this process as text. Imports no torch."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

DEEPEST = 80
"""Frames of one stack that are kept, the innermost."""

_WRITERS = {
    os.path.join(os.path.dirname(__file__), f"{name}.py")
    for name in (
        "_stacks",
        "_hang_dump",
        "_rank_monitor",
        "_monitor_base",
        "_stop_agreement",
        "_failure_reports",
    )
}
"""The position of the thread that writes the dump is its caller's frame."""

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_the_users(self) -> bool:
        """True if the code is neither Python's, nor torch's, torchhal's, or that of another installed package."""
        if self.file.startswith(("<", _library(), *_packages())):
            return False
        return _INSTALLED.search(self.file) is None


def users_place(frames: Sequence[Frame]) -> str:
    """Return the first of ``frames``, the innermost first, in the user's own code; else in another package."""
    own = (frame for frame in frames if frame.is_the_users)
    others = (frame for frame in frames if not frame.file.startswith(("<", _library(), *_packages())))
    return next((str(frame) for frame in (*own, *others)), "")


@functools.cache
def _library() -> str:
    return os.path.dirname(threading.__file__) + os.sep


@functools.cache
def _packages() -> tuple[str, ...]:
    """Return the folders of torch, of this package and of its plugins, as far as they are imported."""
    names = [name for name in sys.modules if name in ("torch", "torchhal") or re.fullmatch(r"torchhal_\w+", name)]
    files = [getattr(sys.modules[name], "__file__", None) for name in names]
    return tuple(os.path.dirname(file) + os.sep for file in files if file)


def all_threads(caught: tuple[int, TracebackType] | None = None) -> Iterator[dict[str, Any]]:
    """Return every thread's name and stack, the innermost frame first; the main thread comes first.

    Args:
        caught: a thread and the traceback of an error that it has caught: shown is where the error was raised.
    """
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    current = sys._current_frames()
    for ident in sorted(current, key=lambda ident: ident != main):
        if caught is not None and caught[0] == ident:
            inner = [_frame(frame, line) for frame, line in traceback.walk_tb(caught[1])]
            frames = [*reversed(inner), *_outwards(caught[1].tb_frame.f_back)]
        else:
            frames = list(itertools.dropwhile(lambda frame: frame.file in _WRITERS, _outwards(current[ident])))
        yield {
            "name": names.get(ident, f"thread {ident}"),
            "main": ident == main,
            "at": users_place(frames),
            "stack": [str(frame) for frame in frames[:DEEPEST]],
        }


def _outwards(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        yield _frame(frame, frame.f_lineno)
        frame = frame.f_back


def _frame(frame: FrameType, line: int | None) -> Frame:
    return Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name)
