"""Which checkpoints of a folder a run has written, in records that lie beside them."""

from __future__ import annotations

import json
import os
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
        """This run continues from ``path``: if a run that has ended wrote that, it is this one from now on."""
        record = self._read(path)
        if record is None or not self._is_that_file(record, self._place(path)):
            return
        elsewhere, here = record["machine"] != machine(), record["process"] == os.getpid()
        if elsewhere or here or _writer_has_died(record):  # of another host it can't be known
            self.run = str(record["run"])

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
        folder, name = os.path.split(path)
        return place_of(join(join(folder, FOLDER), f"{name}.json"), self.storage_options)

    def _read(self, path: str) -> dict[str, Any] | None:
        try:
            with self._record_place(path).reading() as file:
                record = json.loads(file.read())
        except (OSError, ValueError, CheckpointError):
            return None
        known = isinstance(record, dict) and {"run", "writer", "version", "machine", "process"} <= record.keys()
        return record if known else None

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


def _writer_has_died(record: Mapping[str, Any]) -> bool:
    return bool(record["machine"] == machine() and process_is_dead(record["process"]))
