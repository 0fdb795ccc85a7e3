"""Suggest the name that was meant by one that is not known, for the text of an error."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest", "one_of"]


def one_of(names: Iterable[str]) -> str:
    """Join names as ``'a', 'b' or 'c'``."""
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last


def nearest(name: str, known: Iterable[str], cutoff: float = 0.65) -> str | None:
    """Return the name among ``known`` that is close enough to ``name`` to have been meant, or None.

    It is at least as alike as ``cutoff``, of 1: the fewest slips away, and of those the one of its length (``dpp`` is
    ``ddp``, not ``dp``).
    """
    from difflib import get_close_matches  # only ever needed on the way to an error

    close = get_close_matches(name, sorted(known), n=10, cutoff=cutoff)
    return min(close, key=lambda other: (_edit_distance(name, other), abs(len(other) - len(name))), default=None)


def _edit_distance(one: str, other: str) -> int:
    """Count letters to insert, delete, replace, or swap with their neighbour, to turn ``one`` into ``other``."""
    above: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        above_that, above, row = above, row, [i]
        for j, wanted in enumerate(other, 1):
            best = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and wanted == one[i - 2]:
                best = min(best, above_that[j - 2] + 1)
            row.append(best)
    return row[-1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence, ``"; did you mean 'x'?"``, or an empty string."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""
