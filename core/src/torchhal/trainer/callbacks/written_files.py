"""Which checkpoints of a folder a run has written, in records that lie beside them."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torchhal.checkpoint.leftovers import machine, process_is_dead
from torchhal.checkpoint.place import Place, place_of
from torchhal.errors import CheckpointError
from torchhal.trainer.callbacks.checkpoint_files import join

FOLDER = ".torchhal"
"""Beside the checkpoints; a record is called as its checkpoint is, with ``.json``."""
_RUN_ID = re.compile("[0-9a-f]{16}")
OWNER = ".owner-"
"""The file that names the process which continues a run is called as the run, this, and a number."""


class WrittenFiles:
    """What one writer, a callback in a run, may replace and delete.

    State that came from a file proves nothing: it can be a copy's, or somebody's who means harm. So each name has a
    record, made before the file and by one writer only: whose it is, and, once the file is durable, which file it is
    (inode, size and time of change; on object stores whatever they tell versions apart by). Called on rank 0 only.

    Args:
        run: the run's own name, as :func:`new_run_id` gives it.
        writer: tells the callbacks of a run apart.
        storage_options: for URLs.
    """

    def __init__(self, run: str, writer: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.run = run
        self.writer = writer
        self.storage_options = storage_options or {}

    def is_taken(self, path: str) -> bool:
        """Whether anything is at ``path``."""
        return self._place(path).is_taken()

    def claim(self, path: str, *, force: bool = False) -> bool:
        """Take the name ``path`` for a file that is about to be written; False if it is somebody else's.

        Args:
            force: take it from others, too.

        Raises:
            CheckpointError: the record can't be written.
        """
        try:
            place, record = self._place(path), self._read(path)
            taken = place.is_taken()
            if record is None and not taken and self._record_place(path).create(self._text(None)):
                return True
            record = record or self._read(path)  # another run may have been faster
            if record is None:
                free = not taken
            elif self._is_mine(record):
                free = not taken or self._is_that_file(record, place)
            else:
                free = not taken and _writer_has_died(record)
            if free or force:
                self._write(path, None)
            return free or force
        except OSError as error:
            raise CheckpointError(f"{path!r} could not be saved ({type(error).__name__}: {error})") from error

    def wrote(self, path: str) -> None:
        """The file at ``path`` is durable."""
        with suppress(OSError):  # without it the name alone counts, as when the process had been killed here
            self._write(path, self._place(path).version())

    def owns(self, path: str) -> bool:
        """Whether this writer, in this run or one that this one continues, wrote what is at ``path``."""
        record = self._read(path)
        return record is not None and self._is_mine(record) and self._is_that_file(record, self._place(path))

    def release(self, path: str) -> None:
        """Drop the claim of a file that is gone, or was never written."""
        record = self._read(path)
        if record is None or not self._is_mine(record) or self._place(path).is_taken():
            return
        with suppress(OSError, CheckpointError):
            self._record_place(path).remove()

    def adopt(self, path: str) -> None:
        """Become the run that wrote ``path``, which this one continues, unless that lives or another continues it."""
        record = self._read(path)
        if record is None or not self._is_that_file(record, self._place(path)) or not _is_over(record):
            return
        run = str(record["run"])
        with suppress(OSError, CheckpointError):  # as in a folder that takes no file: what is written there says so
            if self._take_over(path, run):
                self.run = run

    def _take_over(self, path: str, run: str) -> bool:
        """Whether this process, of all that continue a run in this folder, is the one that goes on as it.

        Each that does makes a file of the next number, which one of several callers can.
        """
        before = self._owners(path, run)
        if before and not _is_over(_parsed(self._content(before[max(before)]))):
            return False
        number = max(before, default=0) + 1
        own = self._in_folder(path, f"{run}{OWNER}{number}")
        if not own.create(json.dumps({"machine": machine(), "process": os.getpid()}).encode()):
            return False
        if max(self._owners(path, run), default=number) > number:  # others came and went since ``before``
            own.remove()
            return False
        for place in before.values():
            place.remove()
        return True

    def _owners(self, path: str, run: str) -> dict[int, Place]:
        pattern = re.compile(rf".*[/\\]{run}{re.escape(OWNER)}(\d+)")
        folder = place_of(join(os.path.dirname(path), FOLDER), self.storage_options, folder=True)
        matches = ((pattern.fullmatch(place.shown), place) for place in folder.children())
        return {int(match[1]): place for match, place in matches if match}

    # -- records -----------------------------------------------------------------------------------------------------

    def _is_mine(self, record: Mapping[str, Any]) -> bool:
        return bool(record["run"] == self.run and record["writer"] == self.writer)

    def _is_that_file(self, record: Mapping[str, Any], place: Place) -> bool:
        """Also where the record doesn't say, as of a save that was killed: the name was free, or this run's own."""
        version = record["version"]
        return bool(version is None or version == place.version())

    def _place(self, path: str) -> Place:
        return place_of(path, self.storage_options)

    def _record_place(self, path: str) -> Place:
        return self._in_folder(path, f"{os.path.basename(path)}.json")

    def _in_folder(self, path: str, name: str) -> Place:
        return place_of(join(join(os.path.dirname(path), FOLDER), name), self.storage_options)

    def _read(self, path: str) -> dict[str, Any] | None:
        record = _parsed(self._content(self._record_place(path)))
        if record is None or not {"run", "writer", "version"} <= record.keys():
            return None
        return record if _RUN_ID.fullmatch(str(record["run"])) else None  # it becomes a file's name

    def _content(self, place: Place) -> bytes:
        try:
            with place.reading() as file:
                return file.read()
        except (OSError, CheckpointError):
            return b""

    def _text(self, version: Any) -> bytes:
        about = {
            "run": self.run,
            "writer": self.writer,
            "version": version,
            "machine": machine(),
            "process": os.getpid(),
        }
        return json.dumps(about).encode()

    def _write(self, path: str, version: Any) -> None:
        self._record_place(path).write(self._text(version))


def new_run_id() -> str:
    """A name that no other run has."""
    return secrets.token_hex(8)


def _parsed(content: bytes) -> dict[str, Any] | None:
    """Return a record that names a machine and a process; None for anything else."""
    try:
        record = json.loads(content)
    except ValueError:
        return None
    named = isinstance(record, dict) and isinstance(record.get("machine"), str) and type(record.get("process")) is int
    return record if named else None


def _is_over(record: Mapping[str, Any] | None) -> bool:
    """Whether the process of a record is gone, is this one, or was one of another machine, which can't be known."""
    if record is None:
        return False
    here = record["machine"] == machine()
    return not here or record["process"] == os.getpid() or _writer_has_died(record)


def _writer_has_died(record: Mapping[str, Any]) -> bool:
    return bool(record["machine"] == machine() and process_is_dead(record["process"]))
