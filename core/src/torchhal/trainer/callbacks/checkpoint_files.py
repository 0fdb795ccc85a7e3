"""Paths of checkpoints."""

from __future__ import annotations

import os

from torchhal.checkpoint.place import is_url


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
