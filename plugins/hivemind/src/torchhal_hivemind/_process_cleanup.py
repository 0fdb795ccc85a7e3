"""Keep signals from hivemind's processes, and end them with this process.

hivemind forks a process for its DHT and one for each averager; the DHT's runs the network daemon. As forked they
would keep this process's signal handlers, so that a ``terminate`` has no effect; a SIGTERM or Ctrl-C to the whole
process group would end the daemon before the peer has saved its state; and all of them would live on after a SIGKILL
of this process.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_parent: int | None = None  # the process that is inside guarded()
_scratch = ""  # its folder


@contextmanager
def guarded(scratch: str) -> Iterator[None]:
    """Fork hivemind's processes inside: each leads a session of its own, ignores signals, and ends with this one.

    SIGINT is handled here as before afterwards; hivemind makes the process that starts an averager ignore it. What has
    started before an error is ended.

    Args:
        scratch: a folder that they remove if this process is killed.
    """
    global _parent, _scratch
    interrupt = signal.getsignal(signal.SIGINT)
    before = multiprocessing.active_children()
    _parent, _scratch = os.getpid(), scratch
    try:
        yield
    except BaseException:
        end([process for process in multiprocessing.active_children() if process not in before], 0.0)
        raise
    finally:
        _parent = None
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != interrupt:
            signal.signal(signal.SIGINT, interrupt)


def end(processes: Iterable[Any], timeout: float) -> None:
    """Wait for these ``multiprocessing`` processes; kill what is left after ``timeout`` seconds, with its group.

    ``terminate`` would have no effect, and ``multiprocessing`` would block on them at exit without a timeout.
    """
    deadline = time.monotonic() + timeout
    for process in processes:
        if process.pid is None:
            continue
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode != 0:
            _kill_group(process.pid)
            process.join()


def watch(processes: Sequence[Any], daemon: socket.socket, lost: Callable[[Any], object]) -> None:
    """Call ``lost`` in a thread, with the first of ``processes`` that ends, or with None if the daemon does.

    ``daemon`` is a connection to it on which nothing is sent.
    """

    def wait() -> None:
        ended = multiprocessing.connection.wait([*(process.sentinel for process in processes), daemon])
        lost(next((process for process in processes if process.sentinel in ended), None))

    threading.Thread(target=wait, name="torchhal-hivemind", daemon=True).start()


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _in_child() -> None:
    global _parent
    parent, _parent = _parent, None
    if parent is None:
        return
    os.setsid()  # also the group that ends together, the daemon included
    # A handler, as what is ignored stays so in the daemon, and a terminate is how hivemind ends that.
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave_with_parent() -> None:
        never = threading.Event()
        while os.getppid() == parent:
            never.wait(0.5)
        shutil.rmtree(_scratch, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=leave_with_parent, name="torchhal-parent", daemon=True).start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
