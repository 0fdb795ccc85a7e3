"""Track which checkpoints of a folder a run has written, and so may replace and delete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torchhal.checkpoint._temp_files import machine
from torchhal.errors import CheckpointError, TorchhalError
from torchhal.trainer.callbacks._checkpoint_records import (
    RECORD_FORMAT,
    CheckpointRecords,
    describes,
    new_run_id,
    writer_is_dead,
)
from torchhal.trainer.callbacks._run_ownership import RunOwnership, finish_without_waiting


class WrittenFiles:
    """Files that one writer, a callback in a run, may replace and delete.

    A path in the state of a checkpoint is no proof: the file can be a copy of another run's, or be forged. So each
    name has a record, made before the file and by one writer only: its owner, and, once the file is durable, the
    identity of the file (inode, size and time of change; on object stores the version or the like). Used on rank 0
    only.

    Args:
        run: the name of the run, as :func:`new_run_id` returns it.
        writer: distinguishes the callbacks of a run.
        storage_options: options of the file systems behind URLs.
    """

    def __init__(self, run: str, writer: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.run = run
        self.writer = writer
        self.records = CheckpointRecords(storage_options)
        self.ownership = RunOwnership(self.records.storage_options)
        self.continued: dict[str, Any] | None = None
        """The record of the checkpoint that this fit continues from, if a run wrote it there."""
        self.began_ns: int | None = None
        """When this fit began, by the clock of :func:`torchhal.checkpoint.next_ns`; None before its first step."""
        self.ancestors: list[str] = []
        """The runs from which this one was branched off as a run of its own."""

    def continues(self, path: str) -> None:
        """Store the run that wrote ``path``, from which this fit continues, for the takeover of that run."""
        record = self.records.read_matching(path)
        if record is not None:
            self.continued = {**record, "run": str(record["run"])}

    def hold(self, path: str) -> bool:
        """Own the run in the folder of ``path`` until :meth:`let_go`; return False if another process does.

        In that case this fit becomes a run of its own. Call it before :meth:`claim`, at each save: it looks for two
        files, however many there are, and never waits.

        Raises:
            CheckpointError: nothing can be written there.
        """
        folder = os.path.dirname(path)
        with _failing_as_a_save(path):
            if folder in self.ownership.held:
                if not self.ownership.is_lost(folder):
                    return True
            elif finish_without_waiting(self.ownership.take_over(folder, self.run)):
                return True
            self.become(new_run_id())
            finish_without_waiting(self.ownership.take_over(folder, self.run))
            return False

    def become(self, run: str) -> None:
        """Continue as another run than before, which is remembered as an ancestor."""
        self.ancestors = [*self.ancestors, self.run]
        self.run = run

    def let_go(self) -> None:
        """Mark the fit as over: another process may continue it as this run, on another machine too."""
        self.ownership.let_go()

    def is_taken(self, path: str) -> bool:
        """Return whether anything is at ``path``."""
        return self.records.checkpoint(path).is_taken()

    def claim(self, path: str, *, force: bool = False) -> bool:
        """Take the name ``path`` for a file that is about to be written; return False if it is not free.

        Args:
            path: the path of the checkpoint.
            force: take it from other writers, too.

        Raises:
            CheckpointError: the record can't be written.
        """
        with _failing_as_a_save(path):
            checkpoint, record = self.records.checkpoint(path), self.records.read(path)
            taken = checkpoint.is_taken()
            if record is None and not taken and self.records.beside(path).create(self._record(None)):
                return True
            record = record or self.records.read(path)  # another run may have written it first
            if record is None:
                free = not taken
            elif self._is_mine(record):
                free = not taken or describes(record, checkpoint)
            else:
                free = not taken and writer_is_dead(record)
            if free or force:
                self._write_record(path, None)
            return free or force

    def wrote(self, path: str) -> None:
        """Record the identity of the file at ``path``, which is durable from now on."""
        with suppress(Exception):  # without it the name alone counts, as when the process had been killed here
            self._write_record(path, self.records.checkpoint(path).version())

    def owns(self, path: str) -> bool:
        """Return whether this writer, in this run or one that this one continues, wrote the file at ``path``."""
        record = self.records.read(path)
        return record is not None and self._is_mine(record) and describes(record, self.records.checkpoint(path))

    def release(self, path: str) -> None:
        """Remove the record of a file that is gone, or was never written."""
        record = self.records.read(path)
        if record is None or not self._is_mine(record) or self.is_taken(path):
            return
        with suppress(OSError, CheckpointError):
            self.records.beside(path).remove()

    def _is_mine(self, record: Mapping[str, Any]) -> bool:
        return bool(record["run"] == self.run and record["writer"] == self.writer)

    def _record(self, version: Any) -> bytes:
        record = {
            "run": self.run,
            "writer": self.writer,
            "version": version,
            "machine": machine(),
            "process": os.getpid(),
            "format": RECORD_FORMAT,
            "began_ns": self.began_ns,
            "ancestors": self.ancestors,
        }
        return json.dumps(record).encode()

    def _write_record(self, path: str, version: Any) -> None:
        self.records.beside(path).write(self._record(version))


@contextmanager
def _failing_as_a_save(path: str) -> Iterator[None]:
    """Raise CheckpointError, that ``path`` could not be saved, for any error that a file system raises inside."""
    try:
        yield
    except TorchhalError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path!r} could not be saved ({type(error).__name__}: {error})") from error
