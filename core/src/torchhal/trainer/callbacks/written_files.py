"""Which checkpoints of a folder a run has written, in records that lie beside them."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
import weakref
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
"""The file that names the process that a run now belongs to is called as the run, this, and a number."""
RENEWED_S, EXPIRES_S = 10.0, 60.0
"""How often a process says that its fit still runs, and after what silence another machine may go on as its run."""


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
        self._held: dict[str, int] = {}  # the number of this process's owner file, by folder

    def hold(self, path: str) -> None:
        """Be the process of this run in the folder of ``path`` until :meth:`let_go`, as others see; or, if another is
        that by now, become a run of its own. Call before :meth:`claim`.

        Raises:
            CheckpointError: nothing can be written there.
        """
        folder = os.path.dirname(path)
        try:
            if folder in self._held:
                owners = self._owners(path, self.run)  # a stopped process may have written its own again, too late
                if owners and max(owners) == self._held[folder]:
                    _start_renewing(self)
                    return
                self.run, self._held = new_run_id(), {}  # this process stood still, and another continues the run
            if not self._take_over(path, self.run):
                self.run = new_run_id()
                self._take_over(path, self.run)
        except OSError as error:
            raise CheckpointError(f"{path!r} could not be saved ({type(error).__name__}: {error})") from error

    def let_go(self) -> None:
        """The fit is over: whoever continues it may go on as this run, on another machine too."""
        _stop_renewing(self)
        self._write_owner(over=True)

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
        """Become the run that wrote ``path``, which this one continues, unless that lives or another continues it.

        On another machine than its own a run lives until it has said nothing for :data:`EXPIRES_S`, which this waits
        for.
        """
        record = self._read(path)
        if record is None or not self._is_that_file(record, self._place(path)):
            return
        run = str(record["run"])
        with suppress(OSError, CheckpointError):  # as in a folder that takes no file: what is written there says so
            if self._take_over(path, run, record):
                self.run = run

    def _take_over(self, path: str, run: str, record: Mapping[str, Any] | None = None) -> bool:
        """Whether this process, of all that continue a run in this folder, is the one that goes on as it.

        Each that does makes a file of the next number, which one of several callers can.
        """
        before = self._owners(path, run)
        if before:
            newest = before[max(before)]
            if _is_this_process(_parsed(self._content(newest))):  # another callback's, or of an earlier fit
                self._keep(path, max(before))
                return True
            if not self._is_over(path, newest):
                return False
        elif record is not None and not _is_over_here(record):
            return False
        number = max(before, default=-1) + 1
        own = self._owner_place(path, run, number)
        if not own.create(_owner_text()):
            return False
        if max(self._owners(path, run), default=number) > number:  # others came and went since ``before``
            own.remove()
            return False
        for place in before.values():
            place.remove()
        self._keep(path, number)
        return True

    def _keep(self, path: str, number: int) -> None:
        self._held[os.path.dirname(path)] = number
        _start_renewing(self)

    def _is_over(self, path: str, owner: Place) -> bool:
        """Whether the process of an owner file is gone; on another machine, whether it stays silent.

        Ages are by the clock of the file system: two hosts' may differ by more than any limit.
        """
        content, version = self._content(owner), owner.version()
        about = _parsed(content)
        if about is None or about.get("over") or about["machine"] == machine():
            return about is not None and (bool(about.get("over")) or _writer_has_died(about))
        probe = self._in_folder(path, f"now-{secrets.token_hex(8)}")
        probe.create(b"now")
        silent_s = (probe.modified_ns() - owner.modified_ns()) / 1e9
        probe.remove()
        until = time.monotonic() + EXPIRES_S - min(max(silent_s, 0.0), EXPIRES_S)
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            if self._content(owner) != content or owner.version() != version:  # opened, so that NFS looks again
                return False
        return True

    def renew(self) -> None:
        """Say that this process still is the one of its run, where no other has become that."""
        self._write_owner(over=False)

    def _write_owner(self, over: bool) -> None:
        for folder, number in [*self._held.items()]:
            own = self._owner_place(join(folder, "x"), self.run, number)
            with suppress(OSError, CheckpointError):
                if own.is_taken():
                    own.write(_owner_text(over))

    def _owner_place(self, path: str, run: str, number: int) -> Place:
        return self._in_folder(path, f"{run}{OWNER}{number}")

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


def _is_over_here(record: Mapping[str, Any]) -> bool:
    """Whether the process of a record is known to be gone, or is this one."""
    return _is_this_process(record) or _writer_has_died(record)


def _is_this_process(record: Mapping[str, Any] | None) -> bool:
    return record is not None and bool(record["machine"] == machine() and record["process"] == os.getpid())


def _writer_has_died(record: Mapping[str, Any]) -> bool:
    return bool(record["machine"] == machine() and process_is_dead(record["process"]))


def _owner_text(over: bool = False) -> bytes:
    about = {"machine": machine(), "process": os.getpid(), "at": time.monotonic_ns()}
    return json.dumps({**about, "over": True} if over else about).encode()


_renewing: weakref.WeakKeyDictionary[WrittenFiles, tuple[threading.Thread, threading.Event]] = (
    weakref.WeakKeyDictionary()
)


def _start_renewing(files: WrittenFiles) -> None:
    """Renew what ``files`` holds as long as it lives and doesn't let go."""
    if files in _renewing and _renewing[files][0].is_alive():  # as a parent's isn't in a fork
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_renew_until, args=(weakref.ref(files), stop), name="torchhal-renews-run", daemon=True
    )
    _renewing[files] = thread, stop
    thread.start()


def _stop_renewing(files: WrittenFiles) -> None:
    thread, stop = _renewing.pop(files, (None, None))
    if thread is not None and stop is not None:
        stop.set()
        if thread.is_alive():
            thread.join()


def _renew_until(held: weakref.ref[WrittenFiles], stop: threading.Event) -> None:
    while not stop.wait(RENEWED_S):
        files = held()
        if files is None:
            return
        files.renew()
        del files
