"""Derive what a launcher doesn't provide: a port from the job's name, and the ranks that share a host."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchhal.cluster.base import ClusterEnvironment

_FIRST, _COUNT = 12_000, 20_000
"""Below 32768, where Linux's ephemeral ports begin."""


def port_from_job_id(*job: str) -> int:
    """Return a port computed from the job's name: equal in a job, and in another job or step only 1 time in 20,000.

    The whole name counts: the last digits of two jobs' numbers are often the same.

    Args:
        job: what identifies the job, and its step or restart where these may run beside it; the same on all ranks.

    Returns:
        A port from 12000 to 31999, below those that Linux gives to outgoing connections.

    Checks: ENV-07.
    """
    return _FIRST + zlib.crc32("/".join(job).encode()) % _COUNT


@dataclass(frozen=True)
class RankTopology:
    """The place of one process among the hosts of its job."""

    node_rank: int
    local_rank: int
    local_world_size: int
    num_nodes: int


def topology_of(rank: int, hosts: Sequence[str]) -> RankTopology:
    """Return the place of ``rank``, given each rank's host.

    Nodes count in the order of their lowest rank, as in MPI.
    """
    nodes = list(dict.fromkeys(hosts))
    mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return RankTopology(nodes.index(hosts[rank]), mine.index(rank), len(mine), len(nodes))


def gather_topology(environment: ClusterEnvironment, timeout: timedelta | None = None) -> RankTopology:
    """Exchange the hosts of all ranks of the job, over the job's store. Every rank has to call it.

    Raises:
        what :func:`torchhal.distributed.rendezvous.generation_store` raises.
    """
    from torchhal.distributed import rendezvous

    rank, world_size = environment.global_rank(), environment.world_size()
    if world_size == 1:
        return RankTopology(0, 0, 1, 1)
    store = rendezvous.generation_store(
        environment,
        timeout or rendezvous.DEFAULT_TIMEOUT,
        kind=rendezvous.HOSTS,
        name="finding out at {where} which ranks share a host",
        say=_host(),
    )
    return topology_of(rank, [store.get(f"say/{other}").decode() for other in range(world_size)])


def _host() -> str:
    """Return an identifier of this host, distinct from others of the same name: containers often have equal names."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:  # not Linux
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def is_loopback(address: str) -> bool:
    """Return whether other hosts can't reach this one by it."""
    return address in ("localhost", "::1") or address.startswith("127.")
