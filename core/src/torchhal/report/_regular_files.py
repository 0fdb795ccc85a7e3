"""Read regular files alone: a pipe would make a report wait, and a device never ends."""

from __future__ import annotations

import errno
import os
import stat


def read_text(path: str, *, errors: str = "strict") -> str:
    """Return the text of a file.

    Args:
        path: of the file.
        errors: as ``open`` takes it, for what is no UTF-8.

    Raises:
        OSError: it can't be read, or is no regular file.
        ValueError: it is no UTF-8.
    """
    require_regular(path)
    with open(path, encoding="utf-8", errors=errors, newline="") as file:
        return file.read()


def require_regular(path: str) -> None:
    """Raise OSError unless a regular file is at ``path``, or a link to one."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", path)
