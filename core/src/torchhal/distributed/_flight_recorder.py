"""torch's flight recorder: the last collectives of this process, which torch keeps in a ring.

Its functions are private, and differ between versions: the oldest record some backends only. What a version lacks is
left out here, never an error.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from torchhal.distributed._stacks import Frame, users_place

SIZE = 2000
"""Collectives that torch remembers, its own default in 2.13. An entry costs some microseconds and a kilobyte."""

KEPT = 60
"""Collectives of one group that go into a dump."""

DEEPEST = 20
"""Frames of one collective's stack that go into a dump, the innermost."""

CALLERS = 4
"""Functions that are named between a collective and the user's code."""

VARIABLE = "TORCH_FR_BUFFER_SIZE"

_ENTRANCES = ("distributed_c10d.py", "c10d_logger.py")  # the files every collective called from Python passes through
_VARIABLE = re.compile(r"TORCH_(FR|[A-Z]+_TRACE)_BUFFER_SIZE")  # of some backend, as older versions call it
_DUMP = re.compile(r"_dump_\w+_trace")  # one recorder for each kind of device's events


_since = 0


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let torch record collectives inside the context, unless the user has set the variable.

    torch reads a variable when the first process group is made.

    Entered before each: torch keeps recording in one ring, and the collectives of earlier groups no longer count.
    The variable is removed again afterwards: processes started later must not inherit it.
    """
    global _since
    _since = time.time_ns()
    ours = not any(_VARIABLE.fullmatch(name) for name in os.environ)
    if ours:
        os.environ[VARIABLE] = str(SIZE)
    try:
        yield
    finally:
        if ours:
            os.environ.pop(VARIABLE, None)


def collectives() -> list[dict[str, Any]]:
    """Return the last collectives that this process has entered, oldest first, of each group :data:`KEPT`.

    ``number`` counts those of one group and backend, alike on every rank that takes part in all of them.
    """
    kept: dict[Any, list[dict[str, Any]]] = {}
    lives: dict[Any, int] = {}  # a group made again reuses its name and numbers, but has another id
    for entry in sorted(_entries(), key=lambda entry: int(entry.get("pg_id", 0))):
        if int(entry.get("time_created_ns", 0)) < _since:
            continue
        key = (str(entry.get("process_group")), _backend(entry), bool(entry.get("is_p2p")))
        if lives.setdefault(key, entry.get("pg_id", 0)) != entry.get("pg_id", 0):
            lives[key], kept[key] = entry["pg_id"], []
        kept.setdefault(key, []).append(entry)
    last = [entry for entries in kept.values() for entry in entries[-KEPT:]]
    return [_plain(entry) for entry in sorted(last, key=lambda entry: int(entry.get("time_created_ns", 0)))]


def last() -> str:
    """Return the last collective that this process entered, for a message; empty if none is recorded."""
    recorded = collectives()
    return f"{recorded[-1]['name']} number {recorded[-1]['number']}" if recorded else ""


def groups() -> dict[str, list[int]]:
    """Return the ranks of each process group that this process is in, by the name under which torch records it."""
    world = getattr(dist.distributed_c10d, "_world", None)
    try:
        return {str(world.pg_names[group]): sorted(ranks) for group, ranks in world.pg_group_ranks.items()}  # type: ignore[union-attr]
    except (AttributeError, KeyError, TypeError):
        return {}


def _entries() -> list[dict[str, Any]]:
    functions: dict[str, Callable[[], bytes]] = vars(getattr(torch._C, "_distributed_c10d", object))  # type: ignore[assignment]
    found: list[dict[str, Any]] = []
    for name in functions:
        if _DUMP.fullmatch(name):
            # a private function that has changed must not hide the original error
            with contextlib.suppress(Exception), _no_compiler():
                found += pickle.loads(functions[name]()).get("entries", [])
    return found


@contextlib.contextmanager
def _no_compiler() -> Iterator[None]:
    """Keep torch from importing its compiler (800 modules, seconds) to name frames that can't be compiled code."""
    if "_inductor" in vars(torch):
        yield
        return
    cache = SimpleNamespace(PyCodeCache=SimpleNamespace(stack_frames_for_code=lambda path, line: None))
    stand_in = SimpleNamespace(codecache=cache)
    vars(torch)["_inductor"] = stand_in  # which torch itself imports on access
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is stand_in:
            del vars(torch)["_inductor"]


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    between_two = bool(entry.get("is_p2p"))
    frames = [Frame(str(f["filename"]), int(f["line"]), str(f["name"])) for f in entry.get("frames", ())]
    return {
        "group": str(_first(entry.get("process_group"))),
        "backend": _backend(entry),
        "number": int(entry.get("p2p_seq_id" if between_two else "collective_seq_id", 0)),
        "between_two": between_two,
        "name": str(entry.get("profiling_name", "")).partition(":")[2],
        "sizes": entry.get("input_sizes", []),
        "dtypes": entry.get("input_dtypes", []),
        "state": str(entry.get("state", "")),
        "at": users_place(frames),
        "by": _callers(frames),
        "stack": [str(frame) for frame in frames[:DEEPEST]],
    }


def _backend(entry: dict[str, Any]) -> str:
    return str(entry.get("profiling_name", "")).partition(":")[0]


def _callers(frames: list[Frame]) -> str:
    """Return the functions between torch's collective and the user's code, the innermost first."""
    names = []
    for frame in frames:
        if frame.is_the_users:
            break
        if not frame.file.endswith(_ENTRANCES) and frame.function not in names:
            names.append(frame.function)
    return " < ".join(names[:CALLERS])


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, Sequence) and value else ""
