"""Verify that the processes at a rendezvous belong to the same job, before they wait for each other.

Otherwise a duplicate rank, or differing numbers of processes, would look like missing ranks.
"""

from __future__ import annotations

import json
import os
import socket

import torchhal
from torchhal.distributed.stores import Store
from torchhal.errors import DistributedError


class Identity:
    """The identity of this process among those that share ``store``."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._mine = json.dumps([world_size, torchhal.__version__, f"{socket.gethostname()}, process {os.getpid()}"])

    def announce(self) -> None:
        """Claim this rank.

        Raises:
            DistributedError: another process has it.
        """
        there = self._store.compare_set(f"here/{self._rank}", "", self._mine).decode()
        if there != self._mine:
            self._refuse(
                f"rank {self._rank} is here twice, as {_text(there)} and as {_text(self._mine)}: every process needs a "
                "rank of its own, and every node a NODE_RANK of its own where the script is started by hand"
            )

    def check(self) -> None:
        """Verify that rank 0 belongs to the same job, and that no rank has posted that it doesn't.

        Raises:
            DistributedError: the jobs differ; the message lists how.
        """
        if self._store.check(["refused"]):
            raise DistributedError(self._store.get("refused").decode())
        if self._rank == 0 or not self._store.check(["here/0"]):
            return
        first = self._store.get("here/0").decode()
        if json.loads(first)[:2] != json.loads(self._mine)[:2]:
            self._refuse(
                f"rank {self._rank} means another job than rank 0: {_text(self._mine)}, and rank 0 is {_text(first)}. "
                "Every process must ask for the same numbers of devices and nodes, with the same version of torchhal"
            )

    def _refuse(self, message: str) -> None:
        self._store.set("refused", message)
        raise DistributedError(message)


def _text(identity: str) -> str:
    world_size, version, place = json.loads(identity)
    return f"one of {world_size} on {place} with torchhal {version}"
