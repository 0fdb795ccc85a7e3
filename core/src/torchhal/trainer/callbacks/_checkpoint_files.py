"""Make and check the folders and paths of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torchhal.checkpoint._locate import location_of
from torchhal.checkpoint._location import is_url
from torchhal.errors import CheckpointError


def normal_folder(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as an absolute local folder, or as a URL without its last slash."""
    text = os.fspath(path)
    return text.rstrip("/") if is_url(text) else os.path.abspath(os.path.expanduser(text))


def join(folder: str, name: str) -> str:
    """Return the path of ``name`` in a local folder or at a URL."""
    return f"{folder}/{name}" if is_url(folder) else os.path.join(folder, name)


def check_writable(folder: str, storage_options: Mapping[str, Any], owner: str = "ModelCheckpoint") -> None:
    """Raise CheckpointError if this process may not write to ``folder``, which need not exist yet.

    For a URL this only checks that there is a file system for it, without a request to it.

    Args:
        folder: where a callback is to save.
        storage_options: those of the checkpoint IO.
        owner: the callback's class, for the message.
    """
    if is_url(folder):
        location_of(join(folder, "x"), storage_options)
        return
    existing = folder
    while not os.path.lexists(existing) and os.path.dirname(existing) != existing:
        existing = os.path.dirname(existing)
    if os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK):
        return
    why = "may not be written to, or lies on a read-only disk" if os.path.isdir(existing) else "is no folder"
    others = " or Trainer(default_root_dir=...) another folder, or save nothing, with enable_checkpointing=False"
    raise CheckpointError(
        f"{owner} is to save in {folder!r}, but {existing!r} {why}: give {owner}(dirpath=...)"
        f"{others if owner == 'ModelCheckpoint' else ' another folder'}"
    )


def earlier_runs(folder: str) -> list[str]:
    """Return, for ``.../version_7/checkpoints``, those of the versions before 7, newest first; else nothing."""
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


def is_filled(folder: str, storage_options: Mapping[str, Any]) -> bool:
    """Return whether anything is in the folder, a path or a URL; False without the folder."""
    if is_url(folder):
        return bool(location_of(folder, storage_options, folder=True).children())
    try:
        with os.scandir(folder) as items:
            return next(items, None) is not None
    except OSError:
        return False
