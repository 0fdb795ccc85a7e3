"""Slurm's short forms: ``node[01-03,07],head`` for hosts, ``2(x3),1`` for tasks per node.

The grammar is that of ``scontrol show hostnames`` (Slurm 22.05): brackets hold numbers and ranges whose width stays,
several groups may follow each other in a name, and nothing but another group may follow the last bracket.
"""

from __future__ import annotations

import re
from itertools import product

_ELEMENT = re.compile(r"([^\[\],\s]*)((?:\[[0-9,\-]+\][^\[\],\s]*)*)(?:,|$)")
_GROUP = re.compile(r"\[([0-9,\-]+)\]([^\[\],\s]*)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MOST = 1_000_000
"""More hosts than any real list has: a mistyped range must not fill the memory."""


def hosts(text: str) -> list[str]:
    """Return the hosts of a list, in its order.

    Raises:
        ValueError: it isn't such a list; the message gives the position.
    """
    found: list[str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _ELEMENT.match(text, position)
        if match is None or not match[0].strip(","):
            raise ValueError(f"no host name at {text[position:]!r}")
        found += _expand(match[1], match[2])
        position = match.end()
        if match[0].endswith(",") and position == len(text):
            raise ValueError("a name is missing after the last comma")
    if not found:
        raise ValueError("it is empty")
    return found


def tasks_per_node(text: str) -> list[int]:
    """Parse ``"2(x2),1"`` as ``[2, 2, 1]``.

    Raises:
        ValueError: what isn't of that form.
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _TASKS.fullmatch(part)
        if match is None or int(match[1]) == 0 or int(match[2] or 1) > _MOST:
            raise ValueError(f"{part!r} is neither a number nor of the form 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand(name: str, groups: str) -> list[str]:
    """Return each combination of the groups' numbers, the last changing quickest."""
    pieces: list[list[str]] = [[name]]
    total = 1
    matches = list(_GROUP.finditer(groups))
    for position, match in enumerate(matches):
        if match[2] and position == len(matches) - 1:
            raise ValueError(f"{match[2]!r} follows the last bracket of {name + groups!r}")
        numbers = _numbers(match[1])
        total *= len(numbers)
        if total > _MOST:
            raise ValueError(f"{name + groups!r} means more than {_MOST} hosts")
        pieces += [numbers, [match[2]]]
    return ["".join(parts) for parts in product(*pieces)]


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST:
            raise ValueError(f"{part!r} is no range")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
