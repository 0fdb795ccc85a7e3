"""``torchhal doctor RUN_DIR``: the dumps of ranks that hung, side by side, and which ranks wait for which."""

from __future__ import annotations

import json
import os
from glob import escape, glob
from typing import Any, Final

from torchhal.cli._hang_analysis import verdict
from torchhal.cli._output import print_json
from torchhal.errors import ConfigurationError

FOLDER: Final = "hang-*"
DEPTH: Final = 3
"""Folders below RUN_DIR that are looked into: a run's own is as deep as that below ``default_root_dir``."""

RANKS: Final = 16
"""Ranks that are printed one by one."""

SHOWN: Final = 8
"""Lines of a stack that are printed, the innermost; the file has all."""

SCHEMA: Final = 1
"""The newest file format that is supported here."""

_CALL: Final[dict[str, type]] = {
    "group": str, "backend": str, "number": int, "between_two": bool, "name": str, "sizes": list, "dtypes": list,
    "at": str, "by": str,
}  # fmt: skip


def report(run_dir: str, *, as_json: bool) -> int:
    """Print the newest hang below ``run_dir``; the exit code.

    Raises:
        ConfigurationError: there is no such folder, or no hang was written below it.
    """
    folder, older = find(run_dir)
    dumps, unreadable = load(folder)
    size = max([dump["world_size"] for dump in dumps.values()] + [rank + 1 for rank in [*dumps, *unreadable]])
    findings = verdict(dumps, size)
    absent = {
        rank: unreadable.get(rank)
        or "it wrote nothing: killed or stopped, or on another machine with a disk of its own"
        for rank in range(size)
        if rank not in dumps
    }
    if as_json:
        print_json(
            {
                "schema": 1,
                "folder": folder,
                "world_size": size,
                "findings": [finding.to_dict() for finding in findings],
                "ranks": [dumps[rank] for rank in sorted(dumps)],
                "absent": {str(rank): reason for rank, reason in absent.items()},
                "older": older,
            }
        )
        return 0
    print(f"{folder}: {size} ranks")
    for finding in findings:
        print("\n".join(finding.lines()))
    # of many ranks only those that are waited for; the others are mostly alike
    waited_for = sorted({rank for finding in findings for rank in finding.missing})
    ranks = list(range(size)) if size <= RANKS else (waited_for or list(range(size)))[:RANKS]
    for rank in ranks:
        print("\n".join(_lines(dumps[rank]) if rank in dumps else [f"rank {rank}: {absent[rank]}"]))
    if len(ranks) < size:
        print(f"and {size - len(ranks)} ranks more: see --json")
    if older:
        print(f"older: {', '.join(older)}")
    return 0


def find(run_dir: str) -> tuple[str, list[str]]:
    """Return the newest folder with dumps in or below ``run_dir``, and the older ones."""
    if not os.path.isdir(run_dir):
        raise ConfigurationError(f"'RUN_DIR' must be the folder of a run (got {run_dir!r}, which is no folder)")
    if glob(os.path.join(escape(run_dir), "rank-*.json")):
        return os.path.normpath(run_dir), []
    found = [
        folder
        for depth in range(DEPTH)
        for folder in glob(os.path.join(escape(run_dir), *["*"] * depth, FOLDER))
        if glob(os.path.join(escape(folder), "rank-*.json"))
    ]
    if not found:
        raise ConfigurationError(
            f"no {FOLDER}/rank-*.json was found in or below {run_dir!r}. Ranks write them when a barrier or collective "
            "times out; the error names the folder, which is in the run's, or in that of temporary files where that "
            "could not be written to"
        )
    newest = max(found, key=lambda folder: (os.path.basename(folder), os.path.getmtime(folder)))
    return os.path.normpath(newest), sorted(os.path.normpath(folder) for folder in found if folder != newest)


def load(folder: str) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Return what each rank wrote, and for the ranks whose file can't be read the reason."""
    dumps: dict[int, dict[str, Any]] = {}
    unreadable: dict[int, str] = {}
    for path in sorted(glob(os.path.join(escape(folder), "rank-*.json"))):
        number = os.path.basename(path)[len("rank-") : -len(".json")]
        if not number.isdigit():
            continue
        rank = int(number)
        try:
            with open(path, encoding="utf-8") as file:
                dumps[rank] = _checked(json.load(file), rank)
        except (OSError, ValueError) as error:
            unreadable[rank] = f"its file {path} can't be read: {error}"
    return dumps, unreadable


def _checked(dump: Any, rank: int) -> dict[str, Any]:
    """Return ``dump``, if it has this version's format; else raise ValueError that names its format."""
    if not isinstance(dump, dict) or not isinstance(dump.get("schema"), int):
        raise ValueError("it isn't what a rank writes")
    if dump["schema"] > SCHEMA:
        raise ValueError(f"it was written by a newer torchhal (schema {dump['schema']}, known is {SCHEMA})")
    kinds: dict[str, type] = {"rank": int, "world_size": int}
    if "silent" in dump:
        kinds |= {"silent": str, "stacks_from_outside": list}
    else:
        kinds |= {"host": str, "pid": int, "why": str, "doing": str, "step": int}
        kinds |= {"groups": dict, "collectives": list, "threads": list}
    _check("it", dump, kinds)
    for call in dump.get("collectives", ()):
        _check("a collective of it", call, _CALL)
    for thread in dump.get("threads", ()):
        _check("a thread of it", thread, {"main": bool, "at": str, "stack": list})
    if dump["rank"] != rank:
        raise ValueError(f"it is rank {dump['rank']}'s")
    return dump


def _check(what: str, value: Any, kinds: dict[str, type]) -> None:
    for name, kind in kinds.items():
        if not isinstance(value, dict) or not isinstance(value.get(name), kind):
            raise ValueError(f"{what} has no {name!r} of type {kind.__name__}")


def _lines(dump: dict[str, Any]) -> list[str]:
    """Yield the lines of one rank: its main thread's position, and why it wrote."""
    rank = dump["rank"]
    if "silent" in dump:
        return [f"rank {rank}: it wrote nothing: {dump['silent']}", *_running(dump["stacks_from_outside"])]
    doing = f", in {dump['doing']}" if dump["doing"] else ""
    lines = [f"rank {rank} ({dump['host']}, process {dump['pid']}): step {dump['step']}{doing}"]
    main = next((thread for thread in dump["threads"] if thread.get("main")), None)
    if main is not None:
        lines += [f"    {place}" for place in dict.fromkeys(filter(None, (main["at"], *main["stack"][:1])))]
    return [*lines, f"    wrote because {dump['why']}"]


def _running(stacks: list[str]) -> list[str]:
    """Return, of the stacks that a signal handler wrote, that of the thread that it interrupted."""
    start = next((index for index, line in enumerate(stacks) if line.startswith("Current thread")), None)
    if start is None:
        return [f"    {line}" for line in stacks]
    end = next((index for index in range(start, len(stacks)) if not stacks[index].strip()), len(stacks))
    shown = [f"    {line.strip()}" for line in stacks[start + 1 : end][:SHOWN]]
    return [*shown, "    ..."] if end - start - 1 > SHOWN else shown
