"""Warn once for each topic, on rank 0 only."""

from __future__ import annotations

import warnings
from typing import Any


class WarnOnce:
    """Warnings of which each topic has one at most; ``strategy`` has the process's rank."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._topics: set[str] = set()

    def __call__(self, topic: str, message: str) -> None:
        """Warn with ``message`` on rank 0, unless there was a warning on ``topic``."""
        if topic not in self._topics and self._strategy.is_global_zero:
            warnings.warn(message, stacklevel=2)
        self._topics.add(topic)
