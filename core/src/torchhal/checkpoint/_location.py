"""Define the location of a checkpoint: a local file or one behind an fsspec URL, with the same few operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, BinaryIO


class CheckpointLocation(ABC):
    """A path of a checkpoint: a local file, or one behind an fsspec URL.

    ``torchhal.checkpoint.location_of`` makes it. A checkpoint IO that reads and writes through one works for both, and
    its saves are atomic.

    Checks: CIO-06 to CIO-10, CIO-13, CIO-16, CIO-24.
    """

    shown: str
    """The path as messages and listings write it."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[BinaryIO]:
        """Return the file, open for reading, seekable and local.

        Raises FileNotFoundError or, for what isn't a file, CheckpointError.
        """

    @abstractmethod
    def replacing(self) -> AbstractContextManager[BinaryIO]:
        """Return a new file that takes this path when the block ends and leaves no trace when it raises.

        A local one has another name in the same folder until then; it is brought to the disk and renamed, and the
        folder is brought to the disk too. Missing folders are created. The file can be written to, and not sought.

        Raises:
            CheckpointError: a folder is at this path, or the folder of the path can't be created.
            OSError: the file can't be written, e.g. as the disk is full.
        """

    @abstractmethod
    def ends(self, head: int, tail: int) -> tuple[bytes, bytes]:
        """Return the first ``head`` and the last ``tail`` bytes; two empty ones where no readable file is."""

    @abstractmethod
    def is_checkpoint_file(self) -> bool:
        """Return whether a file is here that isn't the leftover of a save."""

    @abstractmethod
    def remove(self) -> None:
        """Delete the file or link; nothing if there is none, CheckpointError for a folder."""

    @abstractmethod
    def children(self) -> list[CheckpointLocation]:
        """Return the files in this folder, leftovers apart; empty without the folder."""

    @abstractmethod
    def is_taken(self) -> bool:
        """Return whether anything is here: a file of any kind, a folder, a link to nothing."""

    @abstractmethod
    def version(self) -> list[Any] | None:
        """Return plain data that distinguishes this file or folder from earlier and later ones here; None if absent."""

    @abstractmethod
    def create(self, content: bytes) -> bool:
        """Create a small file, and its folder, and return True; return False if one is here.

        Where the system can, exactly one of several callers receives True.
        """

    @abstractmethod
    def write(self, content: bytes) -> None:
        """Make or replace a small file, not durably: after a crash of the machine it may be the old one, or empty."""

    @abstractmethod
    def modified_ns(self) -> int:
        """Return when the file was last written, in ns since the epoch; 0 where that isn't known."""


def is_url(path: str) -> bool:
    """Return whether it is accessed through fsspec, and not the local file system."""
    return "://" in path
