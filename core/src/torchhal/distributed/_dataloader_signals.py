"""Data-loading workers that outlive a SIGTERM to the whole process group."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchhal.distributed.signals import born_blocked


def ignore_sigterm_unless_from_parent(worker_id: int) -> None:
    """Keep a worker of ``torch.utils.data.DataLoader`` alive until the parent ends it; a ``worker_init_fn``.

    Schedulers and terminals signal the whole process group; a worker that the signal ends fails the step before
    the ranks reach the boundary at which they save. The parent itself ends its workers with the same SIGTERM
    (``DataLoader`` at shutdown, ``multiprocessing`` at exit), and only the kernel records the sender: SIGTERM is
    blocked, and a thread takes it together with its sender. SIGINT is ignored: the parent handles it.

    A process that the worker starts inherits the blocked signal, as POSIX has it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait = getattr(signal, "sigtimedwait", None)
    if wait is None:  # macOS and Windows don't report the sender of a signal: keep torch's behaviour
        return
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def take() -> None:
        while True:
            info = wait({signal.SIGTERM}, 1.0)
            # An orphan leaves too: torch's own check runs only between two batches.
            if os.getppid() != parent or (info is not None and info.si_pid == parent):
                os._exit(0)

    threading.Thread(target=take, name="torchhal-sigterm", daemon=True).start()


@contextmanager
def signals_blocked(loader: Any) -> Iterator[None]:
    """Make the iterator of ``loader`` inside it: its workers start with SIGTERM and SIGINT blocked.

    A spawned worker takes seconds until its ``worker_init_fn`` runs, and a signal would end it until then. Only for
    loaders whose workers run :class:`WorkerInit`: nothing else unblocks the signals.
    """
    if not hasattr(signal, "sigtimedwait"):
        yield
        return
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    with born_blocked(context.get_start_method()):
        yield


class WorkerInit:
    """Run :class:`WorkerInit` and then the user's ``worker_init_fn``; pickles when that does (spawned workers)."""

    def __init__(self, function: Callable[[int], object] | None = None) -> None:
        self.function = function

    def __call__(self, worker_id: int) -> None:
        ignore_sigterm_unless_from_parent(worker_id)
        if self.function is not None:
            self.function(worker_id)


def compose_worker_init(function: Callable[[int], object] | None) -> WorkerInit:
    """Return ``function`` with the signal handling before it; applying it twice changes nothing."""
    return function if isinstance(function, WorkerInit) else WorkerInit(function)
