"""Assign ranks to workers: Ray numbers bundles in the order of the request, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankSlot:
    """The place of one worker.

    A node is known by its id: several may share an address.
    """

    rank: int
    local_rank: int
    node_rank: int
    local_world_size: int
    bundle: int
    node_id: str
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.address} ({self.node_id[:8]})"


def seats(
    bundles: Mapping[int, str], addresses: Mapping[str, str], per_bundle: int, driver: str = ""
) -> list[RankSlot]:
    """Return the workers of a placement group, by rank: node for node, the driver's first, then by (node id, address).

    Args:
        bundles: node id of each bundle.
        addresses: address of each node id.
        per_bundle: workers in each bundle.
        driver: node id of the process that asks.
    """
    nodes = sorted(set(bundles.values()), key=lambda node: (node != driver, node, addresses.get(node, "")))
    found: list[RankSlot] = []
    for node_rank, node in enumerate(nodes):
        mine = [bundle for bundle in sorted(bundles) if bundles[bundle] == node for _ in range(per_bundle)]
        for local_rank, bundle in enumerate(mine):
            address = addresses.get(node, "of an unknown address")
            found.append(RankSlot(len(found), local_rank, node_rank, len(mine), bundle, node, address))
    return found


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES")
"""By these variables Ray shows each worker its own devices, and them only."""


def shared_devices(own: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the variables by which every worker of a node sees all its devices, the n-th of local rank n.

    ``own``: what each worker of the node was given, by local rank. A strategy counts the devices of its node, and
    transports between devices of one node want to see both.
    """
    found = {}
    for name in VISIBLE:
        ids = [variables.get(name, "") for variables in own]
        if all(ids):
            found[name] = ",".join(ids)
    return found
