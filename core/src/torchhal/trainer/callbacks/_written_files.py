"""Which checkpoints of a folder a run has written, in records that lie beside them."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torchhal.checkpoint import next_ns
from torchhal.checkpoint._locate import location_of
from torchhal.checkpoint._location import CheckpointLocation
from torchhal.checkpoint._temp_files import machine, process_is_dead
from torchhal.errors import CheckpointError, TorchhalError
from torchhal.trainer.callbacks._checkpoint_files import join

_log = logging.getLogger("torchhal")

FOLDER = ".torchhal"
"""Beside the checkpoints; a record is called as its checkpoint is, with ``.json``."""
RECORD_FORMAT = 2
"""Of records that say when their fit began and which runs it went on from; the first ones had no number."""
_RUN_ID = re.compile("[0-9a-f]{16}")
OWNER = ".owner-"
"""The file that names the process that a run now belongs to is called as the run, this, and a number."""
RENEWED_S, EXPIRES_S = 10.0, 60.0
"""How often a process says that its fit still runs, and after what silence another machine may go on as its run."""
NOW = ".now"
"""Whoever measures a silence writes a file of the run's name and this, to ask the file system for the time."""
Waiting = tuple[str, str, float]
"""A run that may live, the folder, and for how many seconds at most that has to be waited for."""


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
        self.continued: dict[str, Any] | None = None
        """The record of the checkpoint that this fit continues from, if a run wrote it there."""
        self.began_ns: int | None = None
        """When this fit began, by the clock of :func:`torchhal.checkpoint.next_ns`; None before its first step."""
        self.ancestors: list[str] = []
        """The runs from which this one went on as a run of its own."""
        self._held: dict[str, tuple[str, int]] = {}  # the run and the number of this process's owner file, by folder
        self._has_warned = False

    def continues(self, path: str) -> None:
        """Remember which run wrote ``path``, from which this one continues: :func:`take_over` makes something of it."""
        record = self.record(path)
        if record is not None:
            self.continued = {**record, "run": str(record["run"])}

    def record(self, path: str) -> dict[str, Any] | None:
        """Which run wrote what is at ``path``, and what else is known of it; None where nothing is."""
        record = self._read(path)
        return record if record is not None and self._is_that_file(record, self._place(path)) else None

    def hold(self, path: str) -> bool:
        """Be the process of this run in the folder of ``path`` until :meth:`let_go`, as others see; or, if another is
        that by now, become a run of its own and return False. Call before :meth:`claim`.

        This is for each save, and asks for two files, however many there are. It waits for nobody.

        Raises:
            CheckpointError: nothing can be written there.
        """
        folder = os.path.dirname(path)
        with _failing_as_a_save(path):
            if folder in self._held:
                run, number = self._held[folder]
                if self._owner(folder, run, number).is_taken() and not self._owner(folder, run, number + 1).is_taken():
                    _start_renewing(self)
                    return True
                self._held = {}  # this process stood still, and another continues the run
            elif _without_waiting(self._take_over(folder, self.run)):
                return True
            self.become(new_run_id())
            _without_waiting(self._take_over(folder, self.run))
            return False

    def become(self, run: str) -> None:
        """Go on as another run than before."""
        self.ancestors = [*self.ancestors, self.run]
        self.run = run

    def let_go(self) -> None:
        """The fit is over: whoever continues it may go on as this run, on another machine too."""
        _stop_renewing(self)
        self._write_owners(over=True)
        self._held = {}

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
        with _failing_as_a_save(path):
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

    def wrote(self, path: str) -> None:
        """The file at ``path`` is durable."""
        with suppress(Exception):  # without it the name alone counts, as when the process had been killed here
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

    # -- whose the run is --------------------------------------------------------------------------------------------

    def _take_over(
        self, folder: str, run: str, record: Mapping[str, Any] | None = None
    ) -> Generator[Waiting, None, bool]:
        """Whether this process, of all that continue a run in this folder, is the one that goes on as it. Yields while
        that has to be waited for.

        Each that does makes a file of the next number, which one of several callers can.
        """
        before = self._owners(folder, run)
        if before:
            newest = max(before)
            about = _parsed(self._content(before[newest]))
            if _is_this_process(about) and not _says_over(about):  # another callback's: the fit is the same
                before[newest].write(_owner_text())
                self._keep(folder, run, newest)
                return True
            if not (yield from self._is_over(folder, run, before[newest])):
                return False
        elif record is not None and not (_is_this_process(record) or _writer_has_died(record)):
            return False
        number = max(before, default=-1) + 1
        own = self._owner(folder, run, number)
        if not own.create(_owner_text()):
            return False
        if max(self._owners(folder, run), default=number) > number:  # others came and went since ``before``
            own.remove()
            return False
        self._keep(folder, run, number)
        for place in (*before.values(), self._now(folder, run)):
            with suppress(Exception):  # what stays has a lower number, or tells a time that is past
                place.remove()
        return True

    def _keep(self, folder: str, run: str, number: int) -> None:
        self._held[folder] = run, number
        _start_renewing(self)

    def _is_over(self, folder: str, run: str, owner: CheckpointLocation) -> Generator[Waiting, None, bool]:
        """Whether the process of an owner file is gone; on another machine, whether it stays silent. So it is with a
        file that can't be read: its host crashed as it was written, or it is being written.

        Ages are by the clock of the file system: two hosts' may differ by more than any limit.
        """
        content, version = self._content(owner), owner.version()
        if version is None:  # another has just taken the run over
            return False
        about = _parsed(content)
        if _says_over(about):
            return True
        if about is not None and about["machine"] == machine():
            return _writer_has_died(about)
        until = time.monotonic() + EXPIRES_S - min(max(self._silent_s(folder, run, owner), 0.0), EXPIRES_S)
        while (left := until - time.monotonic()) > 0:
            yield run, folder, left
            if self._content(owner) != content or owner.version() != version:  # opened, so that NFS looks again
                return False
        return True

    def _silent_s(self, folder: str, run: str, owner: CheckpointLocation) -> float:
        """0 where the file system doesn't say."""
        now = self._now(folder, run)
        try:
            now.write(b"now")
            now_ns, then_ns = now.modified_ns(), owner.modified_ns()
        finally:
            with suppress(Exception):  # as after a kill: whoever asks next, or takes the run over, does it
                now.remove()
        return (now_ns - then_ns) / 1e9 if now_ns and then_ns else 0.0

    def renew(self) -> None:
        """Say that this process still is the one of its run, where no other has become that."""
        self._write_owners(over=False)

    def _write_owners(self, over: bool) -> None:
        for folder, (run, number) in [*self._held.items()]:
            try:
                self._write_owner(folder, run, number, over)
            except Exception as error:  # whatever fsspec's file systems raise: the next attempt may succeed
                if not self._has_warned:
                    _log.warning(
                        f"the owner file of run {run} in {join(folder, FOLDER)!r} could not be renewed, which will be "
                        f"tried again ({type(error).__name__}: {error}): when it has not been for {EXPIRES_S:g} s, "
                        "another host may continue the run"
                    )
                self._has_warned = True

    def _write_owner(self, folder: str, run: str, number: int, over: bool) -> None:
        own = self._owner(folder, run, number)
        if not own.is_taken():
            return
        before_ns = own.modified_ns()
        own.write(_owner_text(over))
        # A process that stood still between the two calls has perhaps brought back what others, who came and went,
        # had removed. They can't have but after a silence.
        silent_ns = own.modified_ns() - before_ns
        if (not before_ns or silent_ns > EXPIRES_S / 2 * 1e9) and max(self._owners(folder, run), default=0) > number:
            own.remove()

    def _owner(self, folder: str, run: str, number: int) -> CheckpointLocation:
        return self._in(folder, f"{run}{OWNER}{number}")

    def _now(self, folder: str, run: str) -> CheckpointLocation:
        return self._in(folder, f"{run}{NOW}")

    def _owners(self, folder: str, run: str) -> dict[int, CheckpointLocation]:
        pattern = re.compile(rf".*[/\\]{run}{re.escape(OWNER)}(\d+)")
        places = location_of(join(folder, FOLDER), self.storage_options, folder=True).children()
        matches = ((pattern.fullmatch(place.shown), place) for place in places)
        return {int(match[1]): place for match, place in matches if match}

    # -- records -----------------------------------------------------------------------------------------------------

    def _is_mine(self, record: Mapping[str, Any]) -> bool:
        return bool(record["run"] == self.run and record["writer"] == self.writer)

    def _is_that_file(self, record: Mapping[str, Any], place: CheckpointLocation) -> bool:
        """Also where the record doesn't say, as of a save that was killed: the name was free, or this run's own."""
        version = record["version"]
        return bool(version is None or version == place.version())

    def _place(self, path: str) -> CheckpointLocation:
        return location_of(path, self.storage_options)

    def _record_place(self, path: str) -> CheckpointLocation:
        return self._in(os.path.dirname(path), f"{os.path.basename(path)}.json")

    def _in(self, folder: str, name: str) -> CheckpointLocation:
        return location_of(join(join(folder, FOLDER), name), self.storage_options)

    def _read(self, path: str) -> dict[str, Any] | None:
        record = _parsed(self._content(self._record_place(path)))
        if record is None or not {"run", "writer", "version"} <= record.keys():
            return None
        return record if _RUN_ID.fullmatch(str(record["run"])) else None  # it becomes a file's name

    def _content(self, place: CheckpointLocation) -> bytes:
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
            "format": RECORD_FORMAT,
            "began_ns": self.began_ns,
            "ancestors": self.ancestors,
        }
        return json.dumps(about).encode()

    def _write(self, path: str, version: Any) -> None:
        self._record_place(path).write(self._text(version))


def take_over(writers: Sequence[tuple[WrittenFiles, str]], *, wait: bool) -> Iterator[Waiting]:
    """Make those who save in one fit, each with its folder, the run that they continue, in all folders; unless that
    lives or another continues it: then they are a run of its own. On rank 0, once, before the first step.

    On another machine than its own a run lives until it has said nothing for :data:`EXPIRES_S`. While that is waited
    for, this yields, and looks again when it is asked for more.

    Args:
        writers: first the one that continues from a checkpoint, if one does.
        wait: False takes whoever would have to be waited for as alive.
    """
    first, folder = writers[0]
    began_ns = next_ns()
    for files, _ in writers:
        files.began_ns = began_ns
    if first.continued is not None:
        record, taken = first.continued, False
        with suppress(Exception):  # as in a folder that takes no file: what is written there says so
            deciding = first._take_over(folder, record["run"], record)
            taken = (yield from deciding) if wait else _without_waiting(deciding)
        for files, _ in writers:  # in other folders, too: it was one run that wrote them
            files.ancestors = ancestors_of(record)
            own, files.run = files.run, record["run"]
            if not taken:
                files.become(own)
    another = new_run_id()
    for files, folder in writers:
        with suppress(Exception):
            if folder in files._held or not files._owners(folder, files.run):
                continue  # where the run is new, it makes no file before its first save
            deciding = files._take_over(folder, files.run)
            if not ((yield from deciding) if wait else _without_waiting(deciding)):
                files.become(another)


def began_ns_of(record: Mapping[str, Any]) -> int | None:
    """When the fit that wrote this record began; None where it doesn't say."""
    began_ns = record.get("began_ns") if record.get("format") == RECORD_FORMAT else None
    return began_ns if type(began_ns) is int else None


def ancestors_of(record: Mapping[str, Any]) -> list[str]:
    """The runs from which that of this record went on as a run of its own; none where it doesn't say."""
    runs = record.get("ancestors") if record.get("format") == RECORD_FORMAT else None
    return [run for run in runs if isinstance(run, str) and _RUN_ID.fullmatch(run)] if isinstance(runs, list) else []


def runs_beside(
    newest: str, paths: Sequence[str], saved_ns: Callable[[str], int], storage_options: Mapping[str, Any] | None
) -> list[str]:
    """The newest checkpoint of each run that saved after the fit that wrote ``newest`` had begun, and that is another
    history: neither went on from the other. What has no record, or one of an earlier release, is passed over.

    Args:
        newest: of all that are looked at, the one that was saved last.
        paths: all that are looked at.
        saved_ns: when one of them was saved.
        storage_options: for URLs.
    """
    files = WrittenFiles("", "", storage_options)
    own = files.record(newest)
    began_ns = None if own is None else began_ns_of(own)
    if own is None or began_ns is None:
        return []
    found: dict[str, str] = {}
    for path in sorted(paths, key=saved_ns, reverse=True):
        if saved_ns(path) <= began_ns:
            break
        record = files.record(path)
        if record is not None and not _one_history(own, record):
            found.setdefault(record["run"], path)
    return list(found.values())


def _one_history(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["run"] in (other["run"], *ancestors_of(other)) or other["run"] in ancestors_of(one)


def _without_waiting(deciding: Iterator[Waiting]) -> bool:
    try:
        next(deciding)
    except StopIteration as decided:
        return bool(decided.value)
    return False


def new_run_id() -> str:
    """A name that no other run has."""
    return secrets.token_hex(8)


@contextmanager
def _failing_as_a_save(path: str) -> Iterator[None]:
    """Whatever a file system raises inside is said as a failure to save ``path``."""
    try:
        yield
    except TorchhalError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path!r} could not be saved ({type(error).__name__}: {error})") from error


def _parsed(content: bytes) -> dict[str, Any] | None:
    """Return a record that names a machine and a process; None for anything else."""
    try:
        record = json.loads(content)
    except ValueError:
        return None
    named = isinstance(record, dict) and isinstance(record.get("machine"), str) and type(record.get("process")) is int
    return record if named else None


def _says_over(about: Mapping[str, Any] | None) -> bool:
    return about is not None and bool(about.get("over"))


def _is_this_process(record: Mapping[str, Any] | None) -> bool:
    return record is not None and bool(record["machine"] == machine() and record["process"] == os.getpid())


def _writer_has_died(record: Mapping[str, Any]) -> bool:
    return bool(record["machine"] == machine() and process_is_dead(record["process"]))


def _owner_text(over: bool = False) -> bytes:
    # "at" is compared with nothing: it makes each text another, for those who look whether it changes.
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
