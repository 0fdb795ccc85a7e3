"""Dump the stacks of each rank's threads when ranks hang.

``torchhal doctor`` compares the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

from torchhal.distributed import (
    _flight_recorder as flight_recorder,
)
from torchhal.distributed import (
    _process_inspection as process_inspection,
)
from torchhal.distributed import (
    _stacks as stacks,
)
from torchhal.distributed._process_inspection import Sighting
from torchhal.distributed.stores import Store

SCHEMA = 1
"""Version of the file format; a reader rejects a higher one."""

FOLDER = "hang-"
"""Prefix of the folder names."""

NAMED = 8
"""Number of missing ranks whose positions an error lists: each costs a read of the store."""

WRITING = 4.0
"""Seconds that writing to one disk may take."""


class HangDump:
    """One file per rank, ``hang-TIME-ID/rank-R.json`` below the run's folder, written at most once in a run.

    Every rank writes, whether its own collective raised or another rank posted the hang in the store; the monitor's
    thread writes while the main thread is stuck. For an unresponsive rank, another one on its machine writes what
    can be inspected from outside.

    Args:
        key: makes a key of the store from a name.
    """

    def __init__(self, rank: int, world_size: int, key: Callable[[str], str]) -> None:
        self.rank, self.world_size = rank, world_size
        self.run_folder = ""
        """Folder of the run's files; if empty, the dumps go to the folder for temporary files."""
        self.doing = ""
        """Name of the torchhal collective or barrier that the main thread is in."""
        self.caught: tuple[int, TracebackType] | None = None
        """The thread whose collective raised, with the error's traceback."""
        self.folder = ""
        """Folder this rank has written to; empty until then, or if no folder is writable."""
        self._key = key
        self._name = ""
        self._rank_0: dict[str, Any] | None = None
        self._seen: dict[int, Sighting] = {}
        self._lock = threading.Lock()
        self._written = False
        self._place = ""
        self._problem = ""

    def introduce(self, store: Store) -> None:
        """Post this process's record; rank 0 also posts the name of this run's dumps."""
        here = process_inspection.process_record()
        if self.rank == 0:
            self._name = f"{FOLDER}{_now()}-{uuid.uuid4().hex[:6]}"
        store.set(self._key(f"where/{self.rank}"), json.dumps({**here, "name": self._name}))

    def learn(self, store: Store) -> None:
        """Read the name that rank 0 posts; called repeatedly until it is there."""
        if not self._name and (there := self._whereabouts(store, 0)) is not None:
            self._name, self._rank_0 = there["name"], there

    @property
    def written(self) -> bool:
        """True if this rank has written or failed to."""
        return self._written

    def answer(self, store: Store) -> None:
        """Post that this rank has written, and its position."""
        store.set(self._key(f"dumped/{self.rank}"), json.dumps({"at": self._place, "folder": self.folder}))

    def write(self, why: str, position: int) -> None:
        """Write this rank's file, the first time. Never raises, so that the original error is kept."""
        with self._lock:
            if self._written:
                return
            self._written = True
            try:
                self._save(self.rank, self._content(why, position))
            except Exception as error:
                self._problem = f"{type(error).__name__}: {error}"

    def write_for(self, rank: int, seen: str, stack: Sequence[str] = ()) -> None:
        """Write what is known of a rank that can't write itself, unless it has written. Never raises."""
        try:
            if self.folder and os.path.exists(os.path.join(self.folder, _file(rank))):
                return
            self._save(rank, {**self._head(rank), "silent": seen, "stacks_from_outside": list(stack)})
        except Exception:
            pass

    def places(self, store: Store, ranks: Collection[int], timeout: float) -> dict[int, str]:
        """Return the positions of the first of ``ranks``, waiting up to ``timeout`` seconds for their files."""
        deadline = time.monotonic() + timeout
        missing, found = set(sorted(ranks)[:NAMED]), {}
        while missing:
            for rank in sorted(missing):
                if store.check([self._key(f"dumped/{rank}")]):
                    found[rank] = json.loads(store.get(self._key(f"dumped/{rank}")))["at"]
                    missing.discard(rank)
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return dict(sorted(found.items()))

    def look_at(self, store: Store | None, ranks: Collection[int]) -> dict[int, Sighting]:
        """Write and return the visible state of the first unresponsive ``ranks``; without a store, of rank 0 only."""
        ranks = sorted(ranks)[:NAMED]
        for rank in ranks:
            if rank in self._seen:
                continue
            there = self._whereabouts(store, rank) if store is not None else self._rank_0 if rank == 0 else None
            if there is not None:
                self._seen[rank] = seen = process_inspection.inspect_process(there)
                self.write_for(rank, seen.text, seen.stacks)
        return {rank: self._seen[rank] for rank in ranks if rank in self._seen}

    def is_introduced(self, store: Store, rank: int) -> bool:
        """Return whether ``rank`` has called :meth:`introduce`."""
        return bool(store.check([self._key(f"where/{rank}")]))

    def hint(self, places: Mapping[int, str | Sighting]) -> str:
        """Return the end of an error's message: the missing ranks' positions and the dump's path, on separate lines."""
        said = {rank: place if isinstance(place, str) else place.text for rank, place in places.items()}
        lines = ["", *(f"rank {rank}: {text}" for rank, text in said.items() if text)]
        if self.folder:
            lines.append(f"To see where all ranks are: torchhal doctor {shlex.quote(self.folder)}")
        elif self._problem:
            lines.append(f"The stacks of rank {self.rank} could not be written: {self._problem}")
        return "\n".join(lines) if len(lines) > 1 else ""

    # -- the file --------------------------------------------------------------------------------------------

    def _head(self, rank: int) -> dict[str, Any]:
        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {"schema": SCHEMA, "rank": rank, "world_size": self.world_size, "written": written}

    def _content(self, why: str, position: int) -> dict[str, Any]:
        threads = list(stacks.all_threads(self.caught))
        recorded = _within(WRITING, flight_recorder.collectives)
        self._place = _place(self.doing, threads, recorded)
        return {
            **self._head(self.rank),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "why": why,
            "doing": self.doing,
            "step": position,
            "groups": flight_recorder.groups(),
            "collectives": recorded,
            "threads": threads,
        }

    def _save(self, rank: int, content: dict[str, Any]) -> None:
        """Write below the run's folder, or below that of temporary files: the run's disk may be full, or read-only.

        Or the disk itself may hang: a separate thread writes, and the caller waits at most WRITING seconds for it.
        """
        text = json.dumps(content, indent=1, default=str)
        name = self._name or f"{FOLDER}{_now()}-of-rank-{self.rank}"  # before rank 0's name was read
        for parent in dict.fromkeys(filter(None, (self.run_folder, tempfile.gettempdir()))):
            folder = os.path.join(os.path.abspath(parent), name)
            outcome = [f"writing to {folder} took longer than {WRITING:g} s"]
            paths = os.path.join(folder, _file(rank)), os.path.join(folder, f"{_file(rank)}.by-{self.rank}")
            thread = threading.Thread(target=_write, args=(*paths, text, outcome), name="torchhal-dump", daemon=True)
            thread.start()
            thread.join(WRITING)
            if not outcome[0]:
                self.folder = folder
                return
            self._problem = outcome[0]

    def _whereabouts(self, store: Store, rank: int) -> dict[str, Any] | None:
        key = self._key(f"where/{rank}")
        if not store.check([key]):
            return None
        there: dict[str, Any] = json.loads(store.get(key))
        return there


def _file(rank: int) -> str:
    return f"rank-{rank}.json"


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())


def _within(seconds: float, look: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the result of ``look``, or nothing: a recorder takes locks of a backend that may be hanging."""
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.extend(look()), name="torchhal-recorder", daemon=True)
    thread.start()
    thread.join(seconds)
    return list(found)


def _write(path: str, part: str, text: str, outcome: list[str]) -> None:
    """Write a whole file, by way of ``part``, or none; ``outcome[0]`` becomes what went wrong."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
        outcome[0] = ""
    except OSError as error:
        outcome[0] = str(error)
        with contextlib.suppress(OSError):
            os.remove(part)


def _place(doing: str, threads: list[dict[str, Any]], recorded: list[dict[str, Any]]) -> str:
    """Return the main thread's position on one line."""
    main = next((thread for thread in threads if thread["main"]), None)
    at = "" if main is None else main["at"] or next(iter(main["stack"]), "")
    last = f"last collective {recorded[-1]['name']} number {recorded[-1]['number']}" if recorded else ""
    return ", ".join(part for part in (f"in {doing}" if doing else "", f"at {at}" if at else "", last) if part)
