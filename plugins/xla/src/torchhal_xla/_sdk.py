"""Whether torch_xla fits this torch. Reads metadata, for importing a wrong one ends in undefined symbols."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.version import Version

SUPPORTED = "2.9"


def problem() -> str:
    """Why torch_xla can't be used here, or an empty string."""
    try:
        installed = Version(version("torch_xla"))
    except PackageNotFoundError:
        return (
            "torch_xla is not installed; it needs a torch of its own version: pip install torchhal-xla[vendor] in an "
            f"environment with torch {SUPPORTED} (this one has torch {torch.__version__})"
        )
    torch_version = Version(torch.__version__)
    if installed.release[:2] != torch_version.release[:2]:
        return (
            f"torch_xla {installed} loads beside torch {_minor(installed)} only, and this is torch {torch_version}: "
            f"install 'torch=={_minor(installed)}.*', or the torch_xla of {_minor(torch_version)}"
        )
    if _minor(installed) != SUPPORTED:
        return f"torchhal-xla is written for torch_xla {SUPPORTED} (got {installed}): pip install torchhal-xla[vendor]"
    return ""


def _minor(which: Version) -> str:
    return ".".join(map(str, which.release[:2]))
