"""Read what a process has beside its memory and torch's switches: cores, working folder, signal handlers."""

from __future__ import annotations

import os
import signal


def process_state() -> dict[str, str]:
    """Return each by a name for messages; two states are compared by ``==``."""
    handled = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD")}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "the cores that the process may use": str(cores),
        "its working folder": os.getcwd(),
        **{f"its handler of {name}": repr(signal.getsignal(number)) for name, number in handled.items()},
    }
