"""Checkpoints in local files: a new one replaces the old one atomically, once it is on the disk."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

from torchhal.checkpoint._location import CheckpointLocation
from torchhal.checkpoint._temp_files import is_abandoned, is_temporary_name, lock, new_temporary_name
from torchhal.errors import CheckpointError

_BUFFER = 1 << 20
_SEND_EVERY = 32 << 20
_CANT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM}


class LocalPlace(CheckpointLocation):
    """A path on a mounted file system."""

    def __init__(self, path: str, shown: str) -> None:
        self.path = path
        self.shown = shown

    @contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        try:
            mode = os.stat(self.path).st_mode  # before the open, which would wait for ever on a pipe
            if not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                raise CheckpointError(f"{self.shown!r} is {kind}, so it can't be loaded as a checkpoint file")
            file = open(self.path, "rb")  # noqa: SIM115
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no checkpoint at this path", self.shown) from error
        except OSError as error:
            raise CheckpointError(f"{self.shown!r} can't be opened: {error}") from error
        with file:
            yield file

    @contextmanager
    def replacing(self) -> Iterator[BinaryIO]:
        folder = os.path.dirname(self.path) or "."
        if os.path.isdir(self.path) and not os.path.islink(self.path):
            raise CheckpointError(f"{self.shown!r} is a folder, so no checkpoint file can be saved there")
        make_folders(folder)
        _sweep(folder)
        fd, temporary = _create(folder)
        file = _FlowingFile(fd)
        try:
            yield cast(BinaryIO, file)
            file.finish()
            os.replace(temporary, self.path)  # with the lock held, so that no sweep deletes the file before
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            with suppress(OSError):  # closing tries once more to write the buffer
                file.close()
            raise
        file.close()
        sync_folder(folder)

    def ends(self, head: int, tail: int) -> tuple[bytes, bytes]:
        try:
            with self.reading() as file:
                size = os.fstat(file.fileno()).st_size
                first = file.read(head)
                file.seek(max(0, size - tail))
                return first, file.read(tail)
        except (OSError, CheckpointError):
            return b"", b""

    def is_checkpoint_file(self) -> bool:
        return os.path.isfile(self.path) and not is_temporary_name(os.path.basename(self.path))

    def remove(self) -> None:
        try:
            if os.path.isdir(self.path) and not os.path.islink(self.path):
                raise CheckpointError(f"{self.shown!r} is a folder, which no save to one file has written: not removed")
            os.unlink(self.path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise CheckpointError(f"{self.shown!r} can't be removed: {error}") from error

    def children(self) -> list[CheckpointLocation]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:  # the same where a folder above is none, an error where this is
            if os.path.lexists(self.path):
                raise
            return []
        places = (LocalPlace(os.path.join(self.path, name), os.path.join(self.shown, name)) for name in names)
        return [place for place in places if place.is_checkpoint_file()]

    def is_taken(self) -> bool:
        return os.path.lexists(self.path)

    def version(self) -> list[Any] | None:
        try:
            about = os.stat(self.path)
        except OSError:
            return None
        return [about.st_ino, about.st_mtime_ns, about.st_size if stat.S_ISREG(about.st_mode) else None]

    def create(self, content: bytes) -> bool:
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)  # raises its own error
        try:
            with self._beside(content) as temporary:
                os.link(temporary, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            try:
                with open(self.path, "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
        return True

    def write(self, content: bytes) -> None:
        with self._beside(content) as temporary:
            os.replace(temporary, self.path)

    @contextmanager
    def _beside(self, content: bytes) -> Iterator[str]:
        folder = os.path.dirname(self.path) or "."
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, new_temporary_name())
        try:
            with open(temporary, "xb") as file:
                file.write(content)
            yield temporary
        finally:
            with suppress(OSError):
                os.unlink(temporary)

    def modified_ns(self) -> int:
        try:
            return os.stat(self.path).st_mtime_ns
        except OSError:
            return 0


class _FlowingFile:
    """A file whose bytes are written back to disk while more are written, which shortens the final sync."""

    def __init__(self, fd: int) -> None:
        self._file = open(fd, "wb", buffering=_BUFFER)  # noqa: SIM115
        self._written = 0
        self._sent = 0

    def write(self, data: bytes | memoryview) -> int:
        count = self._file.write(data)
        self._written += count
        if self._written - self._sent >= _SEND_EVERY and hasattr(os, "posix_fadvise"):
            # Not a sync in a thread, which commits the file system's journal each time. Linux uses this advice to
            # start writing dirty pages, and to drop clean ones: no other page is evicted from memory
            # for a checkpoint, which is seldom read soon.
            with suppress(OSError):
                os.posix_fadvise(self._file.fileno(), self._sent, self._written - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = self._written
        return count

    def finish(self) -> None:
        """Return when everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def make_folders(folder: str) -> None:
    """Make ``folder`` and its parents durably: a file would be lost with its folder."""
    missing = []
    above = folder
    while above and not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    os.makedirs(folder, exist_ok=True)
    for made in reversed(missing):
        sync_folder(os.path.dirname(made) or ".")


def _create(folder: str) -> tuple[int, str]:
    """Return a new, locked temporary file: beside the target, as a rename is atomic only within one file system."""
    while True:
        path = os.path.join(folder, new_temporary_name())
        # Not tempfile.mkstemp, whose files only their owner may read: here the umask applies.
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        fd = os.open(path, flags, 0o666)
        # Between the two calls another process's sweep may have deleted it as abandoned.
        if lock(fd) is not False and (os.name != "posix" or os.fstat(fd).st_nlink):
            return fd, path
        os.close(fd)


def _sweep(folder: str) -> None:
    """Delete the temporary files of saves that were killed. Never fails a save."""
    if os.name != "posix":
        return  # no locks there
    try:
        names = [name for name in os.listdir(folder) if is_temporary_name(name)]
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                about = os.fstat(fd)
                if stat.S_ISREG(about.st_mode) and is_abandoned(name, fd, time.time() - about.st_mtime):
                    os.unlink(path)
            finally:
                os.close(fd)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make what was renamed or created in ``folder`` durable, where the system can."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except PermissionError:  # folders can't be opened on some systems
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANT_SYNC_FOLDERS:
            raise
    finally:
        os.close(fd)


def sync_file(path: str) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def atomic_replace(path: str) -> Iterator[str]:
    """Yield a new name beside ``path`` for the block to write a file to, durably, and put it at ``path`` at the end.

    The file replaces what is at ``path`` in one step. No trace of it stays when the block raises.
    """
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, new_temporary_name())
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(folder or ".")


def link_or_copy(source: str, new: str) -> None:
    """Give the durable file ``source`` the second name ``new``, which nothing has.

    A durable copy is made where no link can be made, as on another file system.
    """
    try:
        os.link(source, new)
    except OSError:
        shutil.copyfile(source, new)
        sync_file(new)


def link_file(source: str, target: str) -> bool:
    """Call :func:`link_or_copy` to a name that may be taken, in one step. False unless ``source`` is a file."""
    if not os.path.isfile(source):
        return False
    try:
        if not (os.path.exists(target) and os.path.samefile(source, target)):
            with atomic_replace(target) as temporary:
                link_or_copy(source, temporary)
    except OSError as error:
        raise CheckpointError(f"{target!r} could not become a second name of {source!r}: {error}") from error
    return True
