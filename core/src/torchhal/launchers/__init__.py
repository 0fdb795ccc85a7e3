"""Launchers: how the processes of a strategy come to be.

The names are imported on first use: a child's entry point lives in this package, and torch must not be imported
there before the user's script is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal.launchers.base import Launcher
    from torchhal.launchers.external import ExternalLauncher
    from torchhal.launchers.multiprocess import MultiprocessingLauncher
    from torchhal.launchers.subprocess_script import SubprocessScriptLauncher

__all__ = [
    "ExternalLauncher",
    "Launcher",
    "MultiprocessingLauncher",
    "SubprocessScriptLauncher",
]

_HOMES = {
    "ExternalLauncher": "external",
    "Launcher": "base",
    "MultiprocessingLauncher": "multiprocess",
    "SubprocessScriptLauncher": "subprocess_script",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
