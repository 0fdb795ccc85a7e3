"""The names of temporary files, and the detection of abandoned ones."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

PREFIX = ".torchhal-tmp-"
ASIDE, NOTE = "-old", "-name"
"""Suffixes of a checkpoint while another replaces it, and of the file that records its name."""
_NAME = re.compile(rf"{re.escape(PREFIX)}([0-9a-f]{{8}})-([0-9]+)-[0-9a-f]{{8}}({ASIDE}|{NOTE})?")
UNTOUCHED_S = 24 * 3600
"""A live save writes all the time: a file not written to for this long, on any machine, is abandoned."""


def new_temporary_name() -> str:
    """Return a short name that no other save has.

    It is independent of the target's, which may be as long as the system allows.
    """
    return f"{PREFIX}{machine()}-{os.getpid()}-{secrets.token_hex(4)}"


def is_temporary_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


@functools.lru_cache(maxsize=1)
def machine() -> str:
    """Return eight digits for the set of processes with common numbers: one boot of one host, one pid namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def writer_is_dead(name: str) -> bool:
    """Return whether the process in ``name`` ran here and runs no more. False when that can't be known."""
    match = _NAME.fullmatch(name)
    return match is not None and match[1] == machine() and process_is_dead(int(match[2]))


def process_is_dead(number: int) -> bool:
    """Return whether no process of this machine has this number. False when that can't be known."""
    if os.name != "posix":
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def is_untouched(modified_s: float) -> bool:
    """Return whether a file last written at ``modified_s``, in seconds since the epoch, has no writer anywhere."""
    return time.time() - modified_s > UNTOUCHED_S


def lock(fd: int) -> bool | None:
    """Lock the file for this descriptor until it is closed: True, False if another has it, None without locks.

    The kernel drops the lock with the process that held it, however it died, so a temporary file without one has
    no writer. A process number doesn't prove that: containers reuse them.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_abandoned(name: str, fd: int, age_s: float) -> bool:
    """Return whether no save writes the temporary file ``name``, open as ``fd``, any more.

    Not every network file system carries locks from machine to machine, so a file of another one has to be old too.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    locked = lock(fd)
    if locked is None:
        return writer_is_dead(name)
    return locked and (match[1] == machine() or age_s > UNTOUCHED_S)
