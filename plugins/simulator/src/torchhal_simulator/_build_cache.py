"""Keep compiled libraries in a folder that all processes of a user share.

The cache holds, per library::

    device-<key>-<compiler>/device.so     what is loaded
    device-<key>-<compiler>/sha256        its digest: mapping a file that was cut off kills the process
    device-<key>-<compiler>.lock          held by the process that compiles; its content is the last failure
    device-<key>-<compiler>.<random>.tmp  where it compiles; a killed process leaves it, the next one removes it

A library that this user runs may have been made by this user or root, and nobody else: folders and files that another
user owns or may write are refused. Whoever may only read them loads what root has built.

Nothing is pruned: a user gets a few small files per torch, and an age would say nothing about use, as loading a
library from a read-only cache leaves no trace. The folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from torchhal_simulator._build_errors import BuildError, cannot_write
from torchhal_simulator._compiler import COMPILE_LIMIT

if sys.platform == "linux":
    import fcntl

WAIT_LIMIT = 2 * COMPILE_LIMIT
"""Seconds to wait for another process that compiles the same library."""


def cache_folder() -> Path:
    """Return the folder: TORCHHAL_SIM_CACHE, or one in the user's cache; it need not exist."""
    try:
        if named := os.environ.get("TORCHHAL_SIM_CACHE"):
            return Path(named).expanduser().absolute()
        user_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not user_cache.is_absolute():  # the XDG specification: a relative path is invalid, ignore it
            user_cache = Path.home() / ".cache"
        return user_cache / "torchhal-simulator"
    except RuntimeError as error:
        raise BuildError(
            f"there is no folder to compile the simulated accelerator into ({error}): set TORCHHAL_SIM_CACHE to one "
            "that this process can write"
        ) from error


def is_default(cache: Path) -> bool:
    """Return True if nobody has chosen this folder by TORCHHAL_SIM_CACHE."""
    return not os.environ.get("TORCHHAL_SIM_CACHE") and cache == cache_folder()


def check_owner(path: Path) -> None:
    """Return if nobody but this user and root can have made or changed ``path``, or if it isn't there.

    A folder that all may write is sound where it is sticky, as /tmp is: what lies in it is asked next. A link counts as
    what it leads to, and the folder that holds it is not asked: who put it there chose the name.

    Raises:
        BuildError: somebody can.
    """
    try:
        status = path.stat()
    except OSError:
        return
    if status.st_uid not in (0, os.getuid()):
        why = f"belongs to another user (id {status.st_uid})"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (
        stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    ):
        why = f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise BuildError(
        f"{path} {why}, and what lies there is run by whoever uses the simulated accelerator: "
        "chmod go-w it if it is yours, or set TORCHHAL_SIM_CACHE to a folder that only you can write"
    )


def is_sound(library: Path) -> bool:
    """Return True if a library is there and whole.

    Raises:
        BuildError: somebody else may have put it there.
    """
    for path in (library.parent, library, library.parent / "sha256"):
        check_owner(path)
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest().encode() == (library.parent / "sha256").read_bytes()
    except OSError:
        return False


def find_ready(cache: Path, stem: str, key: str, name: str) -> Path | None:
    """Return a sound library of this key, by whichever compiler; None if there is none."""
    with suppress(OSError):
        return next(filter(is_sound, sorted(cache.glob(f"{stem}-{key}-*/{name}"))), None)
    return None


@contextmanager
def hold_lock(lock: IO[bytes], source: str, cache: Path) -> Iterator[None]:
    """Hold ``lock``, which the kernel frees when its holder dies, however that happens."""
    deadline = time.monotonic() + WAIT_LIMIT
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BuildError(
                    f"another process has been compiling {source} for more than {WAIT_LIMIT / 60:g} minutes, or is "
                    f"stopped: end the one that holds {lock.name}, or set TORCHHAL_SIM_CACHE to another folder"
                ) from None
            time.sleep(0.05)
        except OSError as error:  # a file system without locks
            raise cannot_write(cache, error) from error
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing isn't enough where another thread has forked meanwhile


def read_failure(lock: IO[bytes]) -> bytes:
    """Return what :func:`write_failure` wrote last, empty if nothing."""
    lock.seek(0)
    return lock.read()


def write_failure(lock: IO[bytes], message: str) -> None:
    """Write an error for the processes that wait, with an id that makes two equal ones differ."""
    with suppress(OSError):  # a full disk: then each finds out by itself
        lock.truncate(0)
        lock.write(f"{os.urandom(8).hex()}\n{message}".encode(errors="replace"))


def remove_temporary(entry: Path) -> None:
    """Remove this process's folder and those of killed ones.

    A compiler whose parent was killed still runs; it finds its folder gone and fails. A file that it makes at this
    moment goes with the next call.
    """
    for path in entry.parent.glob(f"{entry.name}.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
