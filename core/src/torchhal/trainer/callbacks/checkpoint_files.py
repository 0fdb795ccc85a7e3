"""Paths of checkpoints, and a second name for a file that is already written."""

from __future__ import annotations

import os
from contextlib import suppress

from torchhal.checkpoint.leftovers import new_temporary_name


def is_url(path: str) -> bool:
    return "://" in path


def normal_folder(path: str | os.PathLike[str]) -> str:
    """An absolute local folder, or a URL without its last slash."""
    text = os.fspath(path)
    return text.rstrip("/") if is_url(text) else os.path.abspath(os.path.expanduser(text))


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if is_url(folder) else os.path.join(folder, name)


def earlier_runs(folder: str) -> list[str]:
    """For ``.../version_7/checkpoints`` those of the versions before 7, the newest first; else nothing."""
    run, leaf = os.path.split(folder)
    parent, name = os.path.split(run)
    head, _, number = name.rpartition("_")
    if is_url(folder) or not head or not number.isdigit() or not os.path.isdir(parent):
        return []
    found = []
    for sibling in os.listdir(parent):
        prefix, _, digits = sibling.rpartition("_")
        if prefix == head and digits.isdigit() and int(digits) < int(number):
            found.append((int(digits), os.path.join(parent, sibling, leaf)))
    return [path for _, path in sorted(found, reverse=True)]


def link_durably(source: str, target: str) -> bool:
    """Give the local file ``source`` the second name ``target``, replacing what has it, in one step.

    False where that can't be done (no such links on this file system, not a local file); nothing has changed then.
    """
    if is_url(source) or is_url(target) or not os.path.isfile(source):
        return False
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, new_temporary_name())
    try:
        if os.path.exists(target) and os.path.samefile(source, target):
            return True
        os.link(source, temporary)
        os.replace(temporary, target)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        return False
    _sync(folder)
    return True


def _sync(folder: str) -> None:
    with suppress(OSError):  # not every system can open or sync a folder; the file itself is durable
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
