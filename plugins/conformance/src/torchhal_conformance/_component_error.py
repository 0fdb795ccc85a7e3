"""Locate the line of a component in which an error was raised while a check was running."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from torchhal.errors import PluginError
from torchhal_conformance._check import CheckFailed
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._error_text import LINE, first_line, shortened, text_of

Frame = tuple[str, int]
"""File and line of a call."""


@dataclass(frozen=True)
class ComponentError:
    """Error that was raised while a check was running.

    Attributes:
        error: ``CLASS: MESSAGE``, the message's first line.
        at: ``FILE:LINE`` of the innermost call in the component's own distribution or the author's model; else in the
            check.
        traceback: all of it, of each rank that failed.
        line: text of the line in the check, if it was raised there: what it did with what the component gave it.
    """

    error: str
    at: str
    traceback: str
    line: str = ""

    @property
    def reason(self) -> str:
        """The error and its place, in one line."""
        place = f"{self.at}, in: {self.line}" if self.line else self.at
        return f"{self.error} ({place})" if place else self.error


def locate(error: BaseException, component: ComponentUnderTest) -> ComponentError:
    """Return what ``error``, one that is no measured difference, says and where in ``component`` it was raised."""
    if isinstance(error, CheckFailed):  # a rank's, which has been sent as text
        at, line = _place(error.frames, component)
        return ComponentError(shortened(error.raised, LINE), at, text_of(error), line)
    told = shortened("".join(traceback.format_exception(error)).rstrip())
    at, line = _place(frames_of(error), component)
    return ComponentError(first_line(error), at, told, line)


def frames_of(error: BaseException) -> list[Frame]:
    """Return the calls in which ``error`` was raised, the innermost last."""
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]


def _place(frames: Sequence[Frame], component: ComponentUnderTest) -> tuple[str, str]:
    checks = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checks")
    own = [root for root in (_root(component), *_author_files(component)) if root]
    for roots in (own, [checks]):
        for file, line in reversed(frames):
            for root in roots:
                if _is_in(os.path.realpath(file), root):
                    shown: str = os.path.relpath(os.path.realpath(file), os.path.dirname(root))
                    return f"{shown}:{line}", linecache.getline(file, line).strip() if root == checks else ""
    return "", ""


def _author_files(component: ComponentUnderTest) -> list[str]:
    """Return the files of the author's model and data."""
    modules = [factory.module for factory in (component.model, component.data) if factory is not None]
    files: list[str | None] = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    return [os.path.realpath(file) for file in files if file]


def _is_in(path: str, root: str) -> bool:
    return path == root or path.startswith(root + os.sep)


def _root(component: ComponentUnderTest) -> str:
    """Return the folder of the package that the component's class is in, or its module's file; empty if unknown."""
    try:
        name = component.cls.__module__
    except Exception:  # a class that can't be loaded, which is what the error is about
        try:
            name = component.entry.component.target.partition(":")[0]
        except PluginError:  # nor is its plugin's manifest
            return ""
    for module in (name.partition(".")[0], name):
        file: str | None = getattr(sys.modules.get(module), "__file__", None)
        if file:
            real = os.path.realpath(file)
            return os.path.dirname(real) if os.path.basename(real) == "__init__.py" else real
    return ""
