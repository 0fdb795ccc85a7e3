"""Describe the jobs of a launcher that the kit simulates: the processes of each node, the variables of each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from torchhal.errors import ConfigurationError

Table = Mapping[str, str]
"""The variables of one rank."""

_FORM: Final = re.compile(r"([1-9][0-9]?(?:\+[1-9][0-9]?)*)( cyclic)?")
ROLES: Final = {
    ("0", "1", "2", "3"): "global_rank", ("0", "1", "0", "1"): "local_rank", ("0", "0", "1", "1"): "node_rank",
}  # fmt: skip
"""What a variable holds by its values on the four ranks of two nodes with two each."""
RANKS: Final = 4
"""Ranks of the world in which most checks are made."""


class RankPlace(NamedTuple):
    """The place of one process among all."""

    rank: int
    node_rank: int
    local_rank: int


@dataclass(frozen=True)
class Layout:
    """Number of processes on each node, and how the ranks are distributed to them.

    Attributes:
        sizes: processes of each node, by node rank.
        cyclic: ranks go to the nodes in turn, as by ``srun -m cyclic``; else they fill one node after the other.
    """

    sizes: tuple[int, ...]
    cyclic: bool = False

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of ``"2+2"``, ``"1+1+1"``, ``"4"``, ``"3+1 cyclic"`` and the like.

        Raises:
            ConfigurationError: ``text`` has another form.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"a layout must give the processes of each node, such as '2+2', '1+1+1', '4' or '3+1 cyclic' "
                f"(got {text!r})"
            )
        return cls(tuple(int(size) for size in match[1].split("+")), match[2] is not None)

    def __str__(self) -> str:
        return "+".join(map(str, self.sizes)) + (" cyclic" if self.cyclic else "")

    @property
    def world_size(self) -> int:
        """Processes on all nodes."""
        return sum(self.sizes)

    @property
    def is_even(self) -> bool:
        """True where all nodes have as many processes."""
        return len(set(self.sizes)) == 1

    @cached_property
    def places(self) -> tuple[RankPlace, ...]:
        """Place of each rank."""
        by_node = [(node, local) for node, size in enumerate(self.sizes) for local in range(size)]
        dealt = sorted(by_node, key=lambda one: (one[1], one[0])) if self.cyclic else by_node
        return tuple(RankPlace(rank, node, local) for rank, (node, local) in enumerate(dealt))


@dataclass(frozen=True)
class LauncherWorld:
    """One job of a launcher: its layout, and the variables of each rank."""

    layout: Layout
    tables: tuple[Table, ...]

    def numbers(self, rank: int) -> dict[str, int]:
        """Return the numbers of ``rank``, by the names of the environment's methods."""
        _, node, local = self.layout.places[rank]
        return {
            "world_size": self.layout.world_size, "global_rank": rank, "local_rank": local, "node_rank": node,
            "local_world_size": self.layout.sizes[node],
        }  # fmt: skip


def parse_worlds(given: Sequence[Table] | Mapping[str, Sequence[Table]], where: str) -> dict[str, LauncherWorld]:
    """Return the worlds of an author's ``tables``, by layout.

    Args:
        given: the variables of each of four ranks on two nodes, or layout -> those of each of its ranks.
        where: what holds them, for messages.

    Raises:
        ConfigurationError: an unknown layout, or not a mapping for each of its ranks.
    """
    if not isinstance(given, Mapping):
        given = {"2+2": given} if given else {}
    worlds = {}
    for text, tables in given.items():
        try:
            layout = Layout.parse(text)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None
        worlds[str(layout)] = LauncherWorld(layout, _tables(tables, layout, f"{where} of layout '{layout}'"))
    return worlds


def _tables(given: Any, layout: Layout, where: str) -> tuple[Table, ...]:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ConfigurationError(f"{where} must be a list with the variables of each rank (got {given!r})")
    for number, row in enumerate(given):
        if not isinstance(row, Mapping):
            raise ConfigurationError(f"row {number} of {where} must hold variables by their names (got {row!r})")
        for name, value in row.items():
            if not isinstance(name, str) or not name or set(name) & {"=", "\0"}:
                raise ConfigurationError(f"row {number} of {where} has {name!r}, which can't name a variable")
            if not isinstance(value, str) or "\0" in value:
                raise ConfigurationError(
                    f"{name} in row {number} of {where} must be a string, as in os.environ (got {value!r})"
                )
    if len(given) != layout.world_size:
        raise ConfigurationError(
            f"{where} must have {layout.world_size} rows, one for each rank (got {len(given)}); those of another "
            "layout are given under its name, as in {'1+1+1': [...]}"
        )
    return tuple(given)


def main_world(worlds: Mapping[str, LauncherWorld]) -> LauncherWorld | None:
    """Return the world of four ranks in which most checks are made: two nodes with two each, where the launcher can.

    None where no world has four ranks.
    """
    of_four = [world for world in worlds.values() if world.layout.world_size == RANKS]
    return worlds.get("2+2") or next(iter(of_four), None)
