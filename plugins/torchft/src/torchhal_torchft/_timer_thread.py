"""End TorchFT's timer thread with the groups that need it.

TorchFT starts two threads at the first collective and ends neither: one runs the timeouts of futures, the other looks
every 30 s whether the first is stuck and, if so, ends itself.
"""

from __future__ import annotations

import threading

from torchft import futures

_groups = 0
_lock = threading.Lock()


class _Timeouts(futures._TimeoutManager):  # type: ignore[misc]
    def _watchdog_loop(self) -> None:
        """Do nothing, so that there is no second thread: its exit would have no effect."""

    def shutdown(self) -> None:
        loop = self._event_loop
        super().shutdown()
        if loop is not None:
            loop.close()


def acquire() -> None:
    """Count one more group that needs the thread, and start it for the first."""
    global _groups
    with _lock:
        if not isinstance(futures._TIMEOUT_MANAGER, _Timeouts):
            futures._TIMEOUT_MANAGER = _Timeouts()
        _groups += 1


def release() -> None:
    """Count one group less, and end the thread with the last."""
    global _groups
    with _lock:
        _groups -= 1
        if _groups == 0:
            futures._TIMEOUT_MANAGER.shutdown()
