"""Report why the plugin's C++ can't be compiled."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

FULL: Final = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}
"""The texts for a full disk, by error number."""


class BuildError(ImportError):
    """An error of compiling the plugin's C++; the message has the cause and what to do."""


def cannot_write(cache: Path, error: OSError) -> BuildError:
    """Return the error for a cache that this process can't write, or that is on a full disk."""
    if error.errno in FULL:
        return disk_full(cache, FULL[error.errno])
    return BuildError(
        f"the simulated accelerator can't be compiled into {cache} ({error.strerror}): set TORCHHAL_SIM_CACHE to a "
        "folder that this process can write and lock"
    )


def disk_full(cache: Path, why: str) -> BuildError:
    """Return the error for a cache on a full disk."""
    return BuildError(
        f"the simulated accelerator can't be compiled into {cache} ({why}): make room, or set TORCHHAL_SIM_CACHE to a "
        "folder on another disk"
    )
