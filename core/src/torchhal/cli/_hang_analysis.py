"""Determine which ranks wait for which, from what each rank wrote about the collectives that it entered.

Imports no torch.

Collectives are numbered in each group and backend, equally on all ranks. So two ranks diverged at the first number
with different collectives, and a rank whose last number is lower than another's is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

_LIKE_SIZED: Final = {"all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter", "_all_gather_base"}
"""Collectives into which all ranks put the same sizes and types. In others they may differ."""


@dataclass
class Finding:
    """One sentence of the verdict.

    ``kind`` is ``"different"`` (collectives of one number), ``"missing"`` (some ranks have not arrived), ``"barrier"``,
    ``"even"`` (no rank is missing) or ``"unknown"``; ``missing`` are the ranks that are waited for, and ``places`` has
    the position of each rank concerned.
    """

    kind: str
    text: str
    group: str = ""
    number: int = 0
    places: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        alike: dict[str, list[int]] = {}
        for rank, place in sorted(self.places.items()):
            alike.setdefault(place, []).append(rank)
        return [self.text, *(f"  {_ranks(ranks)}: {place}" for place, ranks in alike.items())]


def verdict(dumps: Mapping[int, dict[str, Any]], world_size: int) -> list[Finding]:
    """Return what keeps the ranks of ``dumps`` waiting, the worst first; a rank that isn't in it wrote nothing."""
    speaking = {rank: dump for rank, dump in dumps.items() if "silent" not in dump}
    findings = _barriers(speaking, world_size)
    entered = _entered(speaking)
    for (group, backend), by_rank in sorted(entered.items()):
        members = _members(speaking, group) or sorted(by_rank)
        findings.append(_compare(group, backend, members, by_rank, dumps))
    if not entered:
        findings.append(
            Finding(
                "unknown",
                "no rank recorded a collective: there was none yet, TORCH_FR_BUFFER_SIZE is 0, or this torch records "
                "none for the backend",
            )
        )
    order = ("different", "missing", "barrier", "unknown", "even")
    worst = sorted(findings, key=lambda finding: order.index(finding.kind))
    return [finding for finding in worst if finding.kind != "even"] or worst


_Calls = dict[int, dict[str, Any]]


def _entered(dumps: Mapping[int, dict[str, Any]]) -> dict[tuple[str, str], dict[int, _Calls]]:
    """Return, by group and backend, for each rank its collectives by number."""
    entered: dict[tuple[str, str], dict[int, _Calls]] = {}
    for rank, dump in dumps.items():
        for call in dump["collectives"]:
            if not call["between_two"]:
                of_group = entered.setdefault((call["group"], call["backend"]), {})
                of_group.setdefault(rank, {})[call["number"]] = call
    return entered


def _members(dumps: Mapping[int, dict[str, Any]], group: str) -> list[int]:
    return sorted({rank for dump in dumps.values() for rank in dump["groups"].get(group, ())})


def _compare(
    group: str, backend: str, members: list[int], by_rank: Mapping[int, _Calls], dumps: Mapping[int, dict[str, Any]]
) -> Finding:
    title = f"group {group} ({_ranks(members)}, {backend})"
    numbers = sorted({number for calls in by_rank.values() for number in calls})
    for number in numbers:
        there = {rank: calls[number] for rank, calls in by_rank.items() if number in calls}
        if len({_signature(call) for call in there.values()}) > 1:
            text = f"{title}: the ranks are in different collectives, all number {number}"
            return Finding("different", text, group, number, {rank: _call(call) for rank, call in there.items()})
    silent = [rank for rank in members if rank not in dumps or "silent" in dumps[rank]]
    last = {rank: max(by_rank.get(rank, {}), default=0) for rank in members if rank not in silent}
    behind = [rank for rank in last if last[rank] < max(last.values())]
    if not behind and not silent:
        number = max(last.values())
        text = f"{title}: all ranks have entered the same {number} collectives, the last: {_latest(by_rank, number)}"
        return Finding("even", text, group, number)
    # the first that not all have entered; the progress of ranks that wrote nothing is unknown
    number = min(last[rank] for rank in behind) + 1 if behind else max(last.values())
    waiting = [rank for rank in last if last[rank] >= number]
    places = {rank: _call(by_rank[rank][number]) for rank in waiting if number in by_rank.get(rank, {})}
    places |= {rank: _elsewhere(dumps[rank], last[rank]) for rank in last if rank not in waiting}
    for rank in silent:
        seen = dumps[rank]["silent"] if rank in dumps else "killed or stopped, or on another machine"
        places[rank] = f"it wrote nothing: {seen}"
    missing = sorted({*(rank for rank in last if rank not in waiting), *silent})
    verb = "waits" if len(waiting) == 1 else "wait"
    text = f"{title}: {_ranks(waiting)} {verb} in {_latest(by_rank, number)} for {_ranks(missing)}"
    return Finding("missing", text, group, number, places, missing)


def _barriers(dumps: Mapping[int, dict[str, Any]], world_size: int) -> list[Finding]:
    """Return ranks that wait in barriers, which don't go through a group."""
    waiting: dict[str, list[int]] = {}
    for rank, dump in dumps.items():
        if dump["doing"].startswith("barrier "):
            waiting.setdefault(dump["doing"], []).append(rank)
    findings = []
    for name, ranks in waiting.items():
        others = [rank for rank in range(world_size) if rank not in ranks]
        if others:
            verb = "waits" if len(ranks) == 1 else "wait"
            text = f"{_ranks(sorted(ranks))} {verb} in {name} for {_ranks(others)}"
            places = {rank: _main(dumps[rank]) for rank in [*ranks, *others] if rank in dumps}
            findings.append(Finding("barrier", text, places=places, missing=others))
    return findings


def _signature(call: dict[str, Any]) -> str:
    if call["name"] not in _LIKE_SIZED:
        return str(call["name"])
    return f"{call['name']} {call['sizes']} {call['dtypes']}"


def _call(call: dict[str, Any]) -> str:
    """Format ``all_reduce number 41 of Float [3], at train.py:12 in training_step``."""
    tensors = ", ".join(f"{dtype} {size}" for dtype, size in zip(call["dtypes"], call["sizes"], strict=False))
    of = f" of {tensors}" if tensors else ""
    at = f", at {call['at']}" if call["at"] else ""
    by = f" (by {call['by']})" if call["by"] else ""
    return f"{call['name']} number {call['number']}{of}{at}{by}"


def _latest(by_rank: Mapping[int, _Calls], number: int) -> str:
    call = next((calls[number] for _, calls in sorted(by_rank.items()) if number in calls), None)
    return f"collective number {number}" if call is None else f"{call['name']} number {number}"


def _elsewhere(dump: dict[str, Any], last: int) -> str:
    came = f"came to number {last} only" if last else "came to none yet"
    return f"{came}, {_main(dump)}"


def _main(dump: dict[str, Any]) -> str:
    """Return where a rank's main thread is."""
    main = next((thread for thread in dump["threads"] if thread.get("main")), None)
    at = "" if main is None else main["at"] or next(iter(main["stack"]), "")
    doing = f"in {dump['doing']}, " if dump["doing"] else ""
    return f"{doing}now at {at}" if at else f"{doing}now at an unknown place"


def _ranks(ranks: list[int]) -> str:
    """Format ranks as ``rank 3``, or ``ranks 0, 1, 4-7``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    shown = [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(shown)}"
