"""Number the processes of a job as Horovod does: by rank, within each host, and across hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """The numbers of one process, with the names that Horovod gives them."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int = 0
    """Its place among the processes of the same ``local_rank``, host by host."""
    cross_size: int = 1


def assign(nodes: Sequence[int]) -> list[Slot]:
    """Return the slot of each rank, given the node of each."""
    size, local = len(nodes), [list(nodes[:rank]).count(node) for rank, node in enumerate(nodes)]
    slots = []
    for rank, node in enumerate(nodes):
        peers = sorted(other for other, its_local in zip(nodes, local, strict=True) if its_local == local[rank])
        local_size = list(nodes).count(node)
        slots.append(Slot(f"node-{node}", rank, size, local[rank], local_size, peers.index(node), len(peers)))
    return slots
