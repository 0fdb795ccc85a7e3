"""Count the records in the file that wandb's own process writes, to know what would survive a kill."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Final

_FILE_HEADER: Final = 7
_BLOCK: Final = 32768
_RECORD_HEADER: Final = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class Records:
    """The records of a ``.wandb`` file, which grows.

    The file is a log of LevelDB's format (``doc/log_format.md`` there) behind a header of seven bytes; its records are
    messages ``wandb_internal.Record``.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = _FILE_HEADER
        self._parts = b""

    def read(self) -> list[bytes]:
        """Return the whole records that have been written since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._place)
                data = file.read()
        except FileNotFoundError:
            return []
        found, at = [], 0
        while True:
            left = _BLOCK - (self._place + at) % _BLOCK
            if left < _RECORD_HEADER.size:
                at += left
                continue
            if at + _RECORD_HEADER.size > len(data):
                break
            _, length, kind = _RECORD_HEADER.unpack_from(data, at)
            end = at + _RECORD_HEADER.size + length
            if end > len(data) or kind not in {_FULL, _FIRST, _MIDDLE, _LAST}:
                break
            self._parts += data[at + _RECORD_HEADER.size : end]
            at = end
            if kind in {_FULL, _LAST}:
                found.append(self._parts)
                self._parts = b""
        self._place += min(at, len(data))
        return found


class RecordCounter:
    """Counts the records of a ``.wandb`` file, which grows, by their kind.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._records = Records(path)
        self._counts: Counter[str] = Counter()

    def count(self) -> Counter[str]:
        """Return how many records of each kind, such as ``"history"`` or ``"config"``, are in the file."""
        from wandb.proto import wandb_internal_pb2 as messages

        for content in self._records.read():
            record = messages.Record()
            record.ParseFromString(content)
            self._counts[record.WhichOneof("record_type")] += 1
        return self._counts
