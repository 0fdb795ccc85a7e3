"""Read what a process has beside its memory and torch's switches: cores, folder, signal handlers, random numbers."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch


def process_state() -> dict[str, str]:
    """Return each by a name for messages; two states are compared by ``==``."""
    handled = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD")}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "the cores that the process may use": str(cores),
        "its working folder": os.getcwd(),
        **{f"its handler of {name}": repr(signal.getsignal(number)) for name, number in handled.items()},
    }


def drawn(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the generators that have drawn between two states of ``torchhal.rng.collect_host``."""

    def is_same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)

    # one that isn't among those before was imported since
    return [name for name, state in after.items() if name in before and not is_same(state, before[name])]
