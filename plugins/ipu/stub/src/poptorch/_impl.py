"""Whether a model is being recorded."""

from __future__ import annotations

from poptorch_stub import marks


def isRunningOnIpu() -> bool:
    return marks.current() is not None
