"""What poptorch-stub adds to poptorch's names: that it is a stub, and what stands for Graphcore's compiler and devices.

Importing this package imports neither torch nor ``poptorch``.
"""

from __future__ import annotations

import os
from importlib import metadata

__version__ = "3.3.0+stub"
"""The release whose API it follows, and that it is none."""

VARIABLE = "POPTORCH_STUB"
"""Set to 1 by those who want the stub. Whoever has it installed by accident must not train on it."""

VENDOR = "poptorch"


def wanted() -> bool:
    return os.environ.get(VARIABLE) == "1"


def check() -> None:
    """Raise ImportError unless the stub is wanted and the real package is not there."""
    if not wanted():
        raise ImportError(
            f"the poptorch that is installed is poptorch-stub {__version__}, which computes on the CPU, for tests: set "
            f"{VARIABLE}=1 to use it, or install Graphcore's own on a machine with IPUs"
        )
    try:
        metadata.distribution(VENDOR)
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"poptorch-stub and {VENDOR} are both installed, and the stub would stand in for the real one: pip uninstall "
        f"poptorch-stub, then install {VENDOR} again"
    )
