"""What bagua-stub adds to Bagua's names: that it is a stub, where it works, and what stands for Bagua's own core.

Importing this package imports neither torch nor ``bagua``.
"""

from __future__ import annotations

import os
from importlib import metadata

__version__ = "0.9.2+stub"
"""The release whose API it follows, and that it is none."""

ACCELERATORS = frozenset({"cpu"})
"""Where it works; Bagua itself works with CUDA only."""

VARIABLE = "BAGUA_STUB"
"""Set to 1 by those who want the stub. Whoever has it installed by accident must not train on it."""

VENDOR = ("bagua", "bagua-cuda102", "bagua-cuda111", "bagua-cuda113", "bagua-cuda115", "bagua-cuda116", "bagua-cuda117")


def wanted() -> bool:
    return os.environ.get(VARIABLE) == "1"


def check() -> None:
    """Raise ImportError unless the stub is wanted and the real package is not there."""
    if not wanted():
        raise ImportError(
            f"the bagua that is installed is bagua-stub {__version__}, for tests on CPUs: set {VARIABLE}=1 to use it, "
            "or install Bagua itself on a machine with NVIDIA GPUs"
        )
    for distribution in VENDOR:
        try:
            metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            continue
        raise ImportError(
            f"bagua-stub and {distribution} are both installed, and the stub would stand in for the real one: "
            f"pip uninstall bagua-stub, then install {distribution} again"
        )
