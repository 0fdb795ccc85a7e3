"""Read and write the records that lie beside checkpoints and name the run that wrote each of them."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchhal.checkpoint._locate import location_of
from torchhal.checkpoint._location import CheckpointLocation
from torchhal.checkpoint._temp_files import machine, process_is_dead
from torchhal.errors import CheckpointError
from torchhal.trainer.callbacks._checkpoint_files import join

RECORD_FOLDER = ".torchhal"
"""The folder beside the checkpoints; a record has the name of its checkpoint with ``.json`` appended."""
RECORD_FORMAT = 2
"""Format of records that hold the start of their fit and the runs it continued; the first format had no number."""
_RUN_ID = re.compile("[0-9a-f]{16}")


class CheckpointRecords:
    """Records of the checkpoints in any folder, as JSON files below :data:`RECORD_FOLDER`.

    Args:
        storage_options: options of the file systems behind URLs.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self.storage_options = storage_options or {}

    def checkpoint(self, path: str) -> CheckpointLocation:
        """Return the location of the checkpoint at ``path``."""
        return location_of(path, self.storage_options)

    def beside(self, path: str) -> CheckpointLocation:
        """Return the location of the record of the checkpoint at ``path``."""
        folder = join(os.path.dirname(path), RECORD_FOLDER)
        return location_of(join(folder, f"{os.path.basename(path)}.json"), self.storage_options)

    def read(self, path: str) -> dict[str, Any] | None:
        """Return the record of the name ``path``; None without one, or for one that is damaged."""
        record = parse_process_note(read_content(self.beside(path)))
        if record is None or not {"run", "writer", "version"} <= record.keys():
            return None
        return record if _RUN_ID.fullmatch(str(record["run"])) else None  # the run is used as part of a file's name

    def read_matching(self, path: str) -> dict[str, Any] | None:
        """Return the record of ``path`` if it is that of the file which is there now; else None."""
        record = self.read(path)
        return record if record is not None and describes(record, self.checkpoint(path)) else None


def describes(record: Mapping[str, Any], checkpoint: CheckpointLocation) -> bool:
    """Return whether ``record`` is that of the file at ``checkpoint``.

    A record without a version is of a save that was killed: it describes any file, since its name was free or the
    run's own when the record was written.
    """
    version = record["version"]
    return bool(version is None or version == checkpoint.version())


def read_content(location: CheckpointLocation) -> bytes:
    """Return the bytes of a file; none where it is missing or can't be read."""
    try:
        with location.reading() as file:
            return file.read()
    except (OSError, CheckpointError):
        return b""


def parse_process_note(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``content`` if it names a machine and a process; None for anything else."""
    try:
        note = json.loads(content)
    except ValueError:
        return None
    named = isinstance(note, dict) and isinstance(note.get("machine"), str) and type(note.get("process")) is int
    return note if named else None


def is_of_this_process(note: Mapping[str, Any] | None) -> bool:
    """Return whether this process wrote ``note``."""
    return note is not None and bool(note["machine"] == machine() and note["process"] == os.getpid())


def writer_is_dead(note: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote ``note`` ran on this machine and has ended."""
    return bool(note["machine"] == machine() and process_is_dead(note["process"]))


def new_run_id() -> str:
    """Return a random name for a run, 16 hexadecimal digits, which no other run has."""
    return secrets.token_hex(8)


def began_ns_of(record: Mapping[str, Any]) -> int | None:
    """Return when the fit that wrote ``record`` began, in nanoseconds; None where the record doesn't hold it."""
    began_ns = record.get("began_ns") if record.get("format") == RECORD_FORMAT else None
    return began_ns if type(began_ns) is int else None


def ancestors_of(record: Mapping[str, Any]) -> list[str]:
    """Return the runs from which the run of ``record`` was branched off; none where the record doesn't hold them."""
    runs = record.get("ancestors") if record.get("format") == RECORD_FORMAT else None
    return [run for run in runs if isinstance(run, str) and _RUN_ID.fullmatch(run)] if isinstance(runs, list) else []


def runs_beside(
    newest: str, paths: Sequence[str], saved_ns: Callable[[str], int], storage_options: Mapping[str, Any] | None
) -> list[str]:
    """Return the newest checkpoint of each other run that saved while the run of ``newest`` was training.

    These runs saved after the fit that wrote ``newest`` had begun, and neither continued the other. Checkpoints without
    a record, or with one of an earlier release, are passed over.

    Args:
        newest: the one of ``paths`` that was saved last.
        paths: the checkpoints to look at.
        saved_ns: returns when a path was saved, in nanoseconds.
        storage_options: options of the file systems behind URLs.
    """
    records = CheckpointRecords(storage_options)
    own = records.read_matching(newest)
    began_ns = None if own is None else began_ns_of(own)
    if own is None or began_ns is None:
        return []
    others: dict[str, str] = {}
    for path in sorted(paths, key=saved_ns, reverse=True):
        if saved_ns(path) <= began_ns:
            break
        record = records.read_matching(path)
        if record is not None and not _continue_each_other(own, record):
            others.setdefault(record["run"], path)
    return list(others.values())


def _continue_each_other(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["run"] in (other["run"], *ancestors_of(other)) or other["run"] in ancestors_of(one)
