"""Keep a run's records in a file until a service has them."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

try:
    import fcntl
except ImportError:  # without POSIX: one process at a time has to send
    fcntl = None  # type: ignore[assignment]

Record = dict[str, Any]

_BLOCK: Final = 1 << 20


class Line(NamedTuple):
    """A line of an outbox: its record, None if the line is torn, and the place behind it."""

    record: Record | None
    end: int


class Outbox:
    """A file of records, one JSON object a line, and a file that says how much of it the service has.

    Any process may append, and any may send: each record is sent once, and again only where a process was killed
    between the service's answer and the note of it. A line that a kill or a full disk cut short is passed over.

    Args:
        folder: the folder of both files, which is created with the first record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records_path = folder / "records.jsonl"
        self._sent_path = folder / "sent"
        self._file: int | None = None
        self._close_file: weakref.finalize[Any, Any] | None = None
        self._is_torn = False

    # -- append ------------------------------------------------------------------------------------------------

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record. It survives the process's end once this returns, and the machine's after :meth:`sync`.

        Raises:
            OSError: it can't be written.
        """
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.records_path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            self._close_file = weakref.finalize(self, os.close, self._file)
            end = os.lseek(self._file, 0, os.SEEK_END)
            self._is_torn = end > 0 and os.pread(self._file, 1, end - 1) != b"\n"
        line = json.dumps(record, default=str, separators=(",", ":")).encode() + b"\n"
        if self._is_torn:  # the beginning of a line is there, which no record of ours may continue
            line = b"\n" + line
        written = os.write(self._file, line)
        self._is_torn = written < len(line)
        if self._is_torn:  # a full disk, which the next write names
            os.write(self._file, line[written:])
            self._is_torn = False

    def sync(self) -> None:
        """Make what was appended survive a failure of the machine.

        Raises:
            OSError: it could not be written.
        """
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file; the next :meth:`append` opens it again."""
        if self._close_file is not None:
            self._file = None
            self._close_file()

    # -- send --------------------------------------------------------------------------------------------------

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Keep other processes from sending meanwhile, where the file system has locks."""
        if fcntl is None or not self.folder.is_dir():
            yield
            return
        with open(self.folder / "lock", "ab") as lock:
            _locks.add(lock.fileno())
            try:
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_UN)  # closing isn't enough: a process that was forked has it open
                _locks.discard(lock.fileno())

    def unsent(self, limit: int, start: int | None = None) -> list[Line]:
        """Return the next lines, at most ``limit``.

        Args:
            limit: how many lines at most.
            start: the place to read from; by default what was sent.
        """
        end = self.sent if start is None else start
        try:
            with open(self.records_path, "rb") as file:
                file.seek(end)
                content = file.read(_BLOCK)
                while b"\n" not in content and (more := file.read(_BLOCK)):  # a record longer than a block
                    content += more
        except FileNotFoundError:
            return []
        lines: list[Line] = []
        for line in content.splitlines(keepends=True):
            if len(lines) == limit or not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            lines.append(Line(record if isinstance(record, dict) else None, end))
        return lines

    @property
    def sent(self) -> int:
        """How many bytes of the file the service has."""
        try:
            number = int(self._sent_path.read_bytes())
        except (FileNotFoundError, ValueError):
            return 0
        return number if 0 <= number <= self.size else 0

    @property
    def size(self) -> int:
        """The length of the file, in bytes."""
        try:
            return os.stat(self.records_path).st_size
        except FileNotFoundError:
            return 0

    @property
    def is_empty(self) -> bool:
        """True if the service has everything."""
        return self.sent == self.size

    def count_unsent(self) -> int:
        """Return how many records the service doesn't have, beside the ends of runs."""
        try:
            with open(self.records_path, "rb") as file:
                file.seek(self.sent)
                return sum(line.endswith(b"\n") and not line.startswith((b"\n", b'{"status":')) for line in file)
        except FileNotFoundError:
            return 0

    def ends_with_status(self) -> bool:
        """Return whether the newest record is the end of a call of the Trainer."""
        with open(self.records_path, "rb") as file:
            file.seek(max(0, self.size - 256))
            return file.read().rstrip(b"\n").rpartition(b"\n")[2].startswith(b'{"status":')

    def mark_sent(self, place: int) -> None:
        """Note that the service has everything before ``place``; for who holds :meth:`sending`."""
        if place > self.sent:
            with open(os.open(self._sent_path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
                file.write(f"{place:020}".encode())  # as long as what it replaces


_locks: set[int] = set()
"""Descriptors of the locks that threads of this process hold, which a process that it forks must not keep."""


def _close_locks() -> None:
    while _locks:
        with suppress(OSError):
            os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)
