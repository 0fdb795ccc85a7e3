"""Launchers: how the processes of a strategy are started.

The names are imported on first use: a child's entry point lives in this package, and torch must not be imported
there before the user's script is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal.launchers.base import Launcher
    from torchhal.launchers.external import ExternalLauncher
    from torchhal.launchers.multiprocess import MultiprocessingLauncher
    from torchhal.launchers.subprocess_script import SubprocessScriptLauncher

__all__ = ["ExternalLauncher", "Launcher", "MultiprocessingLauncher", "SubprocessScriptLauncher"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ExternalLauncher": "external",
        "Launcher": "base",
        "MultiprocessingLauncher": "multiprocess",
        "SubprocessScriptLauncher": "subprocess_script",
    },
)
