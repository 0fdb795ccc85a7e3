"""Keep a run's records in a file until a service has them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

try:
    import fcntl
except ImportError:  # without POSIX: one process at a time has to send
    fcntl = None  # type: ignore[assignment]

Record = dict[str, Any]

_BLOCK: Final = 1 << 20


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
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # -- send --------------------------------------------------------------------------------------------------

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Keep other processes from sending meanwhile, where the file system has locks."""
        if fcntl is None or not self.folder.is_dir():
            yield
            return
        with open(self.folder / "lock", "ab") as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def unsent(self, limit: int, start: int | None = None) -> tuple[list[Record], int]:
        """Return the next records, at most ``limit``, and the place behind them, for :meth:`mark_sent`.

        Args:
            limit: how many records at most.
            start: the place to read from; by default what was sent.
        """
        start = self.sent if start is None else start
        try:
            with open(self.records_path, "rb") as file:
                file.seek(start)
                content = file.read(_BLOCK)
                while b"\n" not in content and (more := file.read(_BLOCK)):  # a record longer than a block
                    content += more
        except FileNotFoundError:
            return [], start
        records: list[Record] = []
        end = start
        for line in content.splitlines(keepends=True):
            if len(records) == limit or not line.endswith(b"\n"):
                break
            end += len(line)
            with suppress(ValueError):
                if isinstance(record := json.loads(line), dict):
                    records.append(record)
        return records, end

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
        """Return how many records the service doesn't have."""
        try:
            with open(self.records_path, "rb") as file:
                file.seek(self.sent)
                return sum(line.endswith(b"\n") and line != b"\n" for line in file)
        except FileNotFoundError:
            return 0

    def mark_sent(self, place: int) -> None:
        """Note that the service has everything before ``place``."""
        with open(os.open(self._sent_path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.write(f"{place:020}".encode())  # as long as what it replaces
