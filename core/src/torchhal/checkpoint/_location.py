"""Where a checkpoint lives: a local file or one behind an fsspec URL, with the same few operations."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from torchhal.checkpoint._temp_files import is_temporary_name
from torchhal.errors import ConfigurationError

_FLATTENED_URL = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")


class Place(ABC):
    """One path. ``shown`` is how messages and listings write it."""

    shown: str

    @abstractmethod
    def reading(self) -> AbstractContextManager[BinaryIO]:
        """The file, open for reading, seekable and local.

        Raises FileNotFoundError or, for what isn't a file, CheckpointError.
        """

    @abstractmethod
    def replacing(self) -> AbstractContextManager[BinaryIO]:
        """A new file that takes this path when the block ends and leaves no trace when it raises."""

    @abstractmethod
    def ends(self, head: int, tail: int) -> tuple[bytes, bytes]:
        """The first ``head`` and the last ``tail`` bytes; two empty ones where no readable file is."""

    @abstractmethod
    def is_checkpoint_file(self) -> bool:
        """Whether a file is here that isn't the leftover of a save."""

    @abstractmethod
    def remove(self) -> None:
        """Delete the file or link; nothing if there is none, CheckpointError for a folder."""

    @abstractmethod
    def children(self) -> list[Place]:
        """The files in this folder, leftovers apart; empty without the folder."""

    @abstractmethod
    def is_taken(self) -> bool:
        """Whether anything is here: a file of any kind, a folder, a link to nothing."""

    @abstractmethod
    def version(self) -> list[Any] | None:
        """What tells this file or folder from any other that was or will be here, as plain data; None for nothing."""

    @abstractmethod
    def create(self, content: bytes) -> bool:
        """Make a small file, and its folder; False if one is here. Where the system can, one of several callers gets
        True."""

    @abstractmethod
    def write(self, content: bytes) -> None:
        """Make or replace a small file, not durably: after a crash of the machine it may be the old one, or empty."""

    @abstractmethod
    def modified_ns(self) -> int:
        """When the file was last written, in ns since the epoch; 0 where that isn't known."""


def is_url(path: str) -> bool:
    """Whether fsspec is asked for it, and not the local file system."""
    return "://" in path


def place_of(
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    call_options: Mapping[str, Any] | None = None,
    *,
    folder: bool = False,
) -> Place:
    """The place ``path`` names.

    ``options`` are an IO's own, for its URLs; ``call_options`` belong to this one path, so that a name among them
    that means nothing there is a TypeError.
    """
    from torchhal.checkpoint._local_file import LocalPlace

    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise TypeError(f"'path' must be a str or os.PathLike[str] (got {path!r})")
    if not text or "\0" in text:
        raise ConfigurationError(f"'path' must name a {'folder' if folder else 'file'} (got {text!r})")
    if not isinstance(path, str) and _FLATTENED_URL.match(text):
        raise ConfigurationError(
            f"'path' must be a str when it is a URL: pathlib makes one slash of two (got {path!r})"
        )
    name = re.split(r"[/\\]" if os.name == "nt" else "/", text)[-1]
    if not folder and name in ("", ".", ".."):
        raise ConfigurationError(f"'path' must name a file (got {text!r}, which is a folder's name)")
    if not folder and is_temporary_name(name):
        raise ConfigurationError(f"'path' must not look like the temporary file of a save (got {text!r})")
    if is_url(text):
        from torchhal.checkpoint._fsspec_file import remote_place

        return remote_place(text, options, call_options)
    if call_options:
        raise TypeError(
            f"'storage_options' must be empty for the local path {text!r} (got {', '.join(map(repr, call_options))})"
        )
    return LocalPlace(text, text)
