"""Checkpoints behind fsspec URLs: written under another name, then moved."""

from __future__ import annotations

import errno
import inspect
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from torchhal.checkpoint._local_file import LocalPlace
from torchhal.checkpoint._location import CheckpointLocation
from torchhal.checkpoint._temp_files import is_temporary_name, is_untouched, new_temporary_name, writer_is_dead
from torchhal.errors import CheckpointError

_PIECE = 8 << 20
_VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)
"""Keys under which fsspec's file systems report the version of a file."""
_COMMON_OPTIONS = frozenset(
    {
        "asynchronous",
        "batch_size",
        "dircache_kwargs",
        "listings_expiry_time",
        "loop",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)


def remote_place(url: str, options: Mapping[str, Any], call_options: Mapping[str, Any] | None) -> CheckpointLocation:
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        fs, path = url_to_fs(url, **{**options, **(call_options or {})})
    except ValueError as error:
        raise CheckpointError(
            f"{url!r} can't be reached ({error}): its protocol must be one of fsspec's, as in 's3://bucket/name', and "
            "a local path has none"
        ) from error
    except ImportError as error:
        raise CheckpointError(f"{url!r} can't be reached here: {error}") from error
    if isinstance(fs, LocalFileSystem):
        _refuse(call_options or {}, frozenset(), url)
        return LocalPlace(path, url)
    known = _known_options(type(fs))
    if known is not None and "::" not in url:  # in a chained URL each option belongs to one protocol
        _refuse(call_options or {}, known, url)
    return RemotePlace(fs, path, url)


def _refuse(given: Mapping[str, Any], known: frozenset[str], url: str) -> None:
    if unknown := [name for name in given if name not in known]:
        allowed = ", ".join(sorted(known)) or "none"
        raise TypeError(f"'storage_options' for {url!r} must be among: {allowed} (got {', '.join(map(repr, unknown))})")


def _known_options(filesystem: type) -> frozenset[str] | None:
    """Return the options a file system takes; None if it passes any others on to a library.

    fsspec's base class accepts and ignores every name, so that a misspelled option would be dropped silently. By
    convention ``**kwargs`` go to that base, and options that are used have another name: ``**ssh_kwargs``,
    ``**storage_options``.
    """
    from fsspec import AbstractFileSystem

    init = filesystem.__init__  # type: ignore[misc]
    parameters = inspect.signature(init).parameters.values()
    others = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    if others not in ([], ["kwargs"]) and init is not AbstractFileSystem.__init__:
        return None
    return _COMMON_OPTIONS.union(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)) - {
        "self"
    }


class RemotePlace(CheckpointLocation):
    """A path on an fsspec file system."""

    def __init__(self, fs: Any, path: str, shown: str) -> None:
        self.fs = fs
        self.path = path
        self.shown = shown

    @contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        # A checkpoint is read twice, checksum first: from a local copy, which can't change in between.
        with tempfile.TemporaryFile() as copy:
            try:
                if self._info().get("type") == "directory":
                    raise CheckpointError(f"{self.shown!r} is a folder, so it can't be loaded as a checkpoint file")
                with self.fs.open(self.path, "rb") as file:
                    while piece := file.read(_PIECE):
                        copy.write(piece)
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, "no checkpoint at this path", self.shown) from error
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"{self.shown!r} can't be read: {type(error).__name__}: {error}") from error
            copy.seek(0)
            yield copy

    @contextmanager
    def replacing(self) -> Iterator[BinaryIO]:
        folder = self.fs._parent(self.path)
        self.fs.makedirs(folder, exist_ok=True)
        with suppress(Exception):
            self._sweep(folder)
        temporary = f"{folder.rstrip('/')}/{new_temporary_name()}"
        file = self.fs.open(temporary, "wb")
        try:
            yield file
            file.close()
            self._move(temporary)
        except BaseException:
            with suppress(Exception):
                file.close()
            with suppress(Exception):
                self.fs.rm_file(temporary)
            raise

    def _move(self, temporary: str) -> None:
        from fsspec import AbstractFileSystem

        if type(self.fs).mv is not AbstractFileSystem.mv:
            self.fs.mv(temporary, self.path)  # a true rename, where there is one
        else:
            # What the general mv would do, but for its reading of * and [ in names as patterns. An object store
            # shows the copy only when it is complete.
            self.fs.cp_file(temporary, self.path)
            self.fs.rm_file(temporary)

    def _sweep(self, folder: str) -> None:
        for entry in self.fs.ls(folder, detail=True):
            name = os.path.basename(entry["name"])
            if is_temporary_name(name) and (writer_is_dead(name) or is_untouched(self._modified_s(entry["name"]))):
                self.fs.rm_file(entry["name"])

    def _modified_s(self, path: str) -> float:
        """Return the time of the last change, or the current time where the file system records none."""
        try:
            return float(self.fs.modified(path).timestamp())
        except (OSError, NotImplementedError):
            return time.time()

    def _info(self) -> dict[str, Any]:
        self.fs.invalidate_cache(self.fs._parent(self.path))  # another process may have written since
        info: dict[str, Any] = self.fs.info(self.path)
        return info

    def ends(self, head: int, tail: int) -> tuple[bytes, bytes]:
        try:
            info = self._info()
            if info.get("type") != "file":
                return b"", b""
            size = int(info["size"])
            return self._cat(0, min(head, size)), self._cat(max(0, size - tail), size)
        except OSError:
            return b"", b""

    def _cat(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end``. Object stores refuse to be asked for none."""
        found: bytes = self.fs.cat_file(self.path, start=start, end=end) if end > start else b""
        return found

    def is_checkpoint_file(self) -> bool:
        try:
            return self._info().get("type") == "file" and not is_temporary_name(os.path.basename(self.path))
        except OSError:
            return False

    def remove(self) -> None:
        try:
            if self._info().get("type") == "directory":
                raise CheckpointError(f"{self.shown!r} is a folder, which no save to one file has written: not removed")
            self.fs.rm_file(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise CheckpointError(f"{self.shown!r} can't be removed: {error}") from error

    def children(self) -> list[CheckpointLocation]:
        try:
            self.fs.invalidate_cache(self.path)
            entries = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        places: list[CheckpointLocation] = []
        for entry in entries:
            name = os.path.basename(entry["name"].rstrip("/"))
            if entry.get("type") == "file" and not is_temporary_name(name):
                places.append(RemotePlace(self.fs, entry["name"], f"{self.shown.rstrip('/')}/{name}"))
        return places

    def is_taken(self) -> bool:
        try:
            self._info()
        except FileNotFoundError:
            return False
        return True

    def version(self) -> list[Any] | None:
        try:
            about = self._info()
        except OSError:
            return None
        return [about.get("size"), *(str(about[key]) for key in _VERSIONS if about.get(key) is not None)]

    def create(self, content: bytes) -> bool:
        if self.is_taken():
            return False
        self.write(content)
        return True

    def write(self, content: bytes) -> None:
        self.fs.makedirs(self.fs._parent(self.path), exist_ok=True)
        self.fs.pipe_file(self.path, content)

    def modified_ns(self) -> int:
        try:
            return int(self.fs.modified(self.path).timestamp() * 1e9)
        except (OSError, NotImplementedError):
            return 0
