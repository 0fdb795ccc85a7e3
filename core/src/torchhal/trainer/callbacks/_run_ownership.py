"""Keep one process as the owner of a run in a folder, by owner files that it renews while its fit lasts."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torchhal.checkpoint._locate import location_of
from torchhal.checkpoint._location import CheckpointLocation
from torchhal.checkpoint._temp_files import machine
from torchhal.trainer.callbacks._checkpoint_files import join
from torchhal.trainer.callbacks._checkpoint_records import (
    RECORD_FOLDER,
    is_of_this_process,
    parse_process_note,
    read_content,
    writer_is_dead,
)

_log = logging.getLogger("torchhal")

_OWNER = ".owner-"
"""Between the run and the number in the name of an owner file."""
_NOW = ".now"
"""After the run in the name of a file that is written to read the file system's clock from it."""
RENEWED_S, EXPIRES_S = 10.0, 60.0
"""Seconds between renewals of an owner file, and the age from which another machine may take the run over."""
Waiting = tuple[str, str, float]
"""A run that may still be alive, its folder, and the maximum wait in seconds to determine that."""


class RunOwnership:
    """The runs that this process owns, one in each folder, as other processes read it from the owner files.

    An owner file has the name of its run and a number. The process with the highest number owns the run in that folder;
    it rewrites its file every :data:`RENEWED_S` seconds, in a thread. Used on rank 0 only.

    Args:
        storage_options: options of the file systems behind URLs.
    """

    def __init__(self, storage_options: Mapping[str, Any]) -> None:
        self._storage_options = storage_options
        self.held: dict[str, tuple[str, int]] = {}
        """The run, and the number of this process's owner file, by folder."""
        self._has_warned = False

    def is_lost(self, folder: str) -> bool:
        """Return whether another process has taken over the run held in ``folder``; if so, hold no run any more.

        This looks for two files, however many there are, and never waits.
        """
        run, number = self.held[folder]
        if self._owner(folder, run, number).is_taken() and not self._owner(folder, run, number + 1).is_taken():
            start_renewing(self)
            return False
        self.held = {}  # this process was suspended for so long that another continues the run
        return True

    def is_owned(self, folder: str, run: str) -> bool:
        """Return whether any process has an owner file of ``run`` in ``folder``."""
        return bool(self._owners(folder, run))

    def take_over(
        self, folder: str, run: str, record: Mapping[str, Any] | None = None
    ) -> Generator[Waiting, None, bool]:
        """Make this process the owner of ``run`` in ``folder``; return whether it is.

        Yields before each check while waiting to determine whether the owner is alive. Of several processes that try
        at the same time one succeeds: each creates the file of the next number, which only one can.

        Args:
            folder: the folder of the checkpoints.
            run: the run to continue.
            record: the record of the checkpoint that is continued; its process counts where there is no owner file.
        """
        before = self._owners(folder, run)
        if before:
            newest = max(before)
            note = parse_process_note(read_content(before[newest]))
            if is_of_this_process(note) and not _is_over(note):  # another callback's, of the same fit
                before[newest].write(_owner_note())
                self._keep(folder, run, newest)
                return True
            if not (yield from self._wait_until_gone(folder, run, before[newest])):
                return False
        elif record is not None and not (is_of_this_process(record) or writer_is_dead(record)):
            return False
        number = max(before, default=-1) + 1
        own = self._owner(folder, run, number)
        if not own.create(_owner_note()):
            return False
        if max(self._owners(folder, run), default=number) > number:  # other owners came and left since ``before``
            own.remove()
            return False
        self._keep(folder, run, number)
        for location in (*before.values(), self._now(folder, run)):
            with suppress(Exception):  # a file that stays has a lower number, or an old time
                location.remove()
        return True

    def renew(self) -> None:
        """Rewrite the owner files of this process, except where another process has taken the run over."""
        self._write_owners(over=False)

    def let_go(self) -> None:
        """Mark the fit as over, after which any process may take its runs over, on another machine too."""
        stop_renewing(self)
        self._write_owners(over=True)
        self.held = {}

    def _keep(self, folder: str, run: str, number: int) -> None:
        self.held[folder] = run, number
        start_renewing(self)

    def _wait_until_gone(self, folder: str, run: str, owner: CheckpointLocation) -> Generator[Waiting, None, bool]:
        """Return whether the process of an owner file is gone.

        One of another machine is gone when it has not renewed its file for :data:`EXPIRES_S`, which is waited for here.
        The same holds for a file that can't be read: its host crashed during the write, or it is being written.

        Ages are by the clock of the file system: two hosts' may differ by more than any limit.
        """
        content, version = read_content(owner), owner.version()
        if version is None:  # another has just taken the run over
            return False
        note = parse_process_note(content)
        if _is_over(note):
            return True
        if note is not None and note["machine"] == machine():
            return writer_is_dead(note)
        until = time.monotonic() + EXPIRES_S - min(max(self._age_s(folder, run, owner), 0.0), EXPIRES_S)
        while (left := until - time.monotonic()) > 0:
            yield run, folder, left
            if read_content(owner) != content or owner.version() != version:  # opened, so that NFS looks again
                return False
        return True

    def _age_s(self, folder: str, run: str, owner: CheckpointLocation) -> float:
        """Return the seconds since ``owner`` was written; 0 where the file system has no times."""
        now = self._now(folder, run)
        try:
            now.write(b"now")
            now_ns, then_ns = now.modified_ns(), owner.modified_ns()
        finally:
            with suppress(Exception):  # as after a kill: the next process that reads the time or takes over removes it
                now.remove()
        return (now_ns - then_ns) / 1e9 if now_ns and then_ns else 0.0

    def _write_owners(self, over: bool) -> None:
        for folder, (run, number) in [*self.held.items()]:
            try:
                self._write_owner(folder, run, number, over)
            except Exception as error:  # fsspec's file systems raise any class: the next attempt may succeed
                if not self._has_warned:
                    _log.warning(
                        f"the owner file of run {run} in {join(folder, RECORD_FOLDER)!r} could not be renewed, which "
                        f"will be tried again ({type(error).__name__}: {error}): when it has not been for "
                        f"{EXPIRES_S:g} s, another host may continue the run"
                    )
                self._has_warned = True

    def _write_owner(self, folder: str, run: str, number: int, over: bool) -> None:
        own = self._owner(folder, run, number)
        if not own.is_taken():
            return
        before_ns = own.modified_ns()
        own.write(_owner_note(over))
        # If this process was suspended between the two calls, others may have taken the run over, ended, and removed
        # the file that was just written again. They can only have done so after it had expired, or nearly.
        age_ns = own.modified_ns() - before_ns
        if (not before_ns or age_ns > EXPIRES_S / 2 * 1e9) and max(self._owners(folder, run), default=0) > number:
            own.remove()

    # -- files -------------------------------------------------------------------------------------------------------

    def _owner(self, folder: str, run: str, number: int) -> CheckpointLocation:
        return self._location(folder, f"{run}{_OWNER}{number}")

    def _now(self, folder: str, run: str) -> CheckpointLocation:
        return self._location(folder, f"{run}{_NOW}")

    def _location(self, folder: str, name: str) -> CheckpointLocation:
        return location_of(join(join(folder, RECORD_FOLDER), name), self._storage_options)

    def _owners(self, folder: str, run: str) -> dict[int, CheckpointLocation]:
        """Return the owner files of ``run`` in ``folder``, by number."""
        pattern = re.compile(rf".*[/\\]{run}{re.escape(_OWNER)}(\d+)")
        locations = location_of(join(folder, RECORD_FOLDER), self._storage_options, folder=True).children()
        matches = ((pattern.fullmatch(location.shown), location) for location in locations)
        return {int(match[1]): location for match, location in matches if match}


def _owner_note(over: bool = False) -> bytes:
    # "at" makes each text differ, for processes that check whether it changes.
    note = {"machine": machine(), "process": os.getpid(), "at": time.monotonic_ns()}
    return json.dumps({**note, "over": True} if over else note).encode()


def _is_over(note: Mapping[str, Any] | None) -> bool:
    return note is not None and bool(note.get("over"))


def finish_without_waiting(takeover: Iterator[Waiting]) -> bool:
    """Return what ``takeover`` returns, or False where it would have to be waited for."""
    try:
        next(takeover)
    except StopIteration as stop:
        return bool(stop.value)
    return False


# -- renewal -----------------------------------------------------------------------------------------------------------

_renewing: weakref.WeakKeyDictionary[RunOwnership, tuple[threading.Thread, threading.Event]] = (
    weakref.WeakKeyDictionary()
)


def start_renewing(ownership: RunOwnership) -> None:
    """Renew the owner files of ``ownership`` in a thread, as long as it exists and holds them."""
    if ownership in _renewing and _renewing[ownership][0].is_alive():  # the parent's thread doesn't exist after a fork
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_renew_until, args=(weakref.ref(ownership), stop), name="torchhal-renews-run", daemon=True
    )
    _renewing[ownership] = thread, stop
    thread.start()


def stop_renewing(ownership: RunOwnership) -> None:
    """End the thread of :func:`start_renewing` and wait for its end."""
    thread, stop = _renewing.pop(ownership, (None, None))
    if thread is not None and stop is not None:
        stop.set()
        if thread.is_alive():
            thread.join()


def _renew_until(reference: weakref.ref[RunOwnership], stop: threading.Event) -> None:
    while not stop.wait(RENEWED_S):
        ownership = reference()
        if ownership is None:
            return
        ownership.renew()
        del ownership
