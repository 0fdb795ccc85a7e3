"""Count the open files of this process."""

from __future__ import annotations

import gc
import os


def open_files() -> int:
    """Return the number of this process's file descriptors, 0 where the system doesn't list them."""
    gc.collect()
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0
