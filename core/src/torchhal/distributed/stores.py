"""torch's key-value stores, used without waiting inside torch.

A store's own wait holds up Python's signal handlers and writes C++ warnings when it expires. A wait here polls
the key and sleeps in between.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # public names of torch.distributed, which forgets to export them to type checkers
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import HashStore, PrefixStore, Store, TCPStore

__all__ = ["EventLog", "HashStore", "PrefixStore", "PrefixedStore", "Store", "TCPStore", "own_connection", "pause"]

LONG = timedelta(days=1)
"""Time-out of connections: they never expire by themselves; each wait has its own time-out."""


class PrefixedStore(PrefixStore):
    """A PrefixStore that can be connected anew: before torch 2.8 it doesn't expose its prefix."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self._torchhal_parts = (prefix, store)


def own_connection(store: Store) -> Store:
    """Return ``store`` over a connection of its own.

    A client serves one request at a time, and some wait for minutes.
    """
    if isinstance(store, PrefixedStore):
        prefix, inner = store._torchhal_parts
        return PrefixedStore(prefix, own_connection(inner))
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, None, False, timeout=LONG, wait_for_workers=False)
    if isinstance(store, PrefixStore) and hasattr(store, "clone"):
        clone: Store = store.clone()
        return clone
    return store  # a HashStore lives in this process; a FileStore opens its file for each request


def pause(waited: float) -> float:
    """Return the seconds to sleep between two reads of a store: a tenth of the time waited, at most 0.1 s."""
    return min(0.1, max(0.0005, waited * 0.1))


def join_address(address: str, port: int) -> str:
    """Join ``address:port`` with the brackets an IPv6 literal needs."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def ranks_text(ranks: list[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 1, 2 and 17 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def first_line(error: BaseException) -> str:
    """Return an error's message without the C++ frames that torch appends."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class EventLog:
    """Events that every rank reads in one order: numbered by a counter in the store, so that one read detects news."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def post(self, store: Store, event: dict[str, Any]) -> None:
        index = store.add(f"{self._prefix}/next", 1)
        store.set(f"{self._prefix}/{index}", json.dumps(event))
        store.add(f"{self._prefix}/posted", 1)

    def count(self, store: Store) -> int:
        """Return the number of events."""
        return int(store.add(f"{self._prefix}/posted", 0))

    def read(self, store: Store, index: int) -> dict[str, Any]:
        """Return event number ``index``, from 1; empty if the rank that took the number ended before it wrote."""
        key, deadline = f"{self._prefix}/{index}", time.monotonic() + 2.0
        while not store.check([key]):
            if time.monotonic() > deadline:  # two ranks post at once: the number is taken and the value follows shortly
                return {}
            time.sleep(0.001)
        event: dict[str, Any] = json.loads(store.get(key))
        return event
