"""The order of saves: a time that is later than that of every checkpoint this process has saved or loaded.

The clock of a host may be set back, and a run may continue on another host. So a checkpoint counts as
later than another if that one was loaded before it was saved. After L. Lamport, "Time, Clocks, and the Ordering of
Events in a Distributed System", Communications of the ACM 21(7), 1978.
"""

from __future__ import annotations

import threading
import time

_lock = threading.Lock()
_newest_ns = 0


def next_ns() -> int:
    """Return the time for a save that begins now, in ns since the epoch.

    It is later than each one that this process has used or has passed to :func:`seen`.
    """
    global _newest_ns
    with _lock:
        _newest_ns = max(time.time_ns(), _newest_ns + 1)
        return _newest_ns


def seen(saved_ns: int) -> None:
    """Record that a checkpoint of this time was loaded: what is saved from now on is later.

    Args:
        saved_ns: what :func:`next_ns` returned for that save.
    """
    global _newest_ns
    with _lock:
        _newest_ns = max(_newest_ns, saved_ns)
