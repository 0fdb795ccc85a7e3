"""Keep a limited number of expensive values, and make one again where it is gone or outdated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LRUCache(dict[Any, Any]):
    """At most ``limit`` values by key, of which the least recently used one is dropped first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def get_or_make(
        self, key: Any, make: Callable[[], Any], *, is_valid: Callable[[Any], bool] = lambda made: True
    ) -> Any:
        """Return the value of ``key``: the one that is kept if it ``is_valid``, else what ``make`` returns."""
        made = self.pop(key, None)
        if made is None or not is_valid(made):
            made = make()
            while len(self) >= self.limit:
                del self[next(iter(self))]
        self[key] = made
        return made
