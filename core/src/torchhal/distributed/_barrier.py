"""Barriers with names, over the store; the error names the missing ranks and their positions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta

from torchhal.distributed.stores import Store, pause, ranks_text
from torchhal.errors import CollectiveTimeoutError


class NamedBarriers:
    """The barriers of one process group, numbered by each rank's own count of calls.

    Args:
        prefix: put before all keys.
        gone: the key that a rank sets when it has ended its work.
        check: called while waiting; raises what ends the wait.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        prefix: str,
        gone: Callable[[int], str],
        check: Callable[[], None],
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._prefix, self._gone, self._check = prefix, gone, check
        self._number = 0
        self._previous = ""

    def meet(self, name: str, timeout: timedelta, last_word: Callable[[], str] | None = None) -> str:
        """Return when all ranks are here: two requests to arrive, one to count, however many ranks there are.

        The rank that arrives last calls ``last_word``; every rank returns its result.
        """
        store, start = self._store, time.monotonic()
        self._number += 1
        key = f"{self._prefix}/{self._number}/{name}"
        look = start + 1.0
        store.set(f"{self._prefix}/at/{self._rank}", json.dumps([self._number, name]))
        if store.add(f"{key}/count", 1) == self._world_size:
            word = "" if last_word is None else last_word()
            store.set(f"{key}/open", f"={word}")  # some stores treat an empty value as missing
            if self._previous:
                # All ranks have arrived, so all have left the previous barrier: delete its keys.
                store.delete_key(f"{self._previous}/count")
                store.delete_key(f"{self._previous}/open")
        else:
            while not store.check([f"{key}/open"]):
                self._check()
                now = time.monotonic()
                if now - start > timeout.total_seconds() or (now > look and self._somebody_is_wrong(name)):
                    if store.check([f"{key}/open"]):
                        break
                    raise self._missing(name, now - start)
                look = max(look, now + 1.0) if now > look else look
                time.sleep(pause(now - start))
            word = store.get(f"{key}/open").decode()[1:]
        self._previous = key
        return word

    def _places(self) -> dict[int, tuple[int, str]]:
        """Return the barrier that each rank reached last."""
        places = {}
        for rank in range(self._world_size):
            key = f"{self._prefix}/at/{rank}"
            if self._store.check([key]):
                number, name = json.loads(self._store.get(key))
                places[rank] = (int(number), str(name))
        return places

    def _somebody_is_wrong(self, name: str) -> bool:
        """Return whether a rank has ended, or is at a barrier of another name instead: this one can't complete."""
        places = self._places()
        if any(number == self._number and other != name for number, other in places.values()):
            return True
        absent = [rank for rank in range(self._world_size) if places.get(rank, (0, ""))[0] < self._number]
        return any(self._store.check([self._gone(rank)]) for rank in absent)

    def _missing(self, name: str, waited: float) -> CollectiveTimeoutError:
        places = self._places()
        missing = [rank for rank in range(self._world_size) if places.get(rank) != (self._number, name)]
        details = []
        for rank in missing[:16]:
            number, place = places.get(rank, (0, ""))
            if number == self._number:
                details.append(f"rank {rank} is in barrier {place!r} instead")
            elif self._store.check([self._gone(rank)]):
                details.append(f"rank {rank} has ended its work")
            elif number == 0:
                details.append(f"rank {rank} came to no barrier yet")
            else:
                details.append(f"rank {rank} was last in barrier {place!r}")
        return CollectiveTimeoutError(
            f"barrier {name!r}: {ranks_text(missing)} did not come within {waited:.1f} s ({'; '.join(details)}). Every "
            "rank must come to the same barriers in the same order: none may stand under 'if rank == 0'.",
            name=name,
            missing=missing,
        )
