"""Inspect a process of this machine that no longer answers. Imports no torch.

A stopped process runs nothing. One that hangs in code holding the GIL runs no Python, but takes signals: its handler,
in C, writes the stacks of its threads into memory that others may read until the process ends.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

_STATES = {
    "T": "is stopped (by SIGSTOP, or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "D": "waits in the kernel, often for a disk or a network file system",
}

_ENDED = ("Z", "X")

_own: tuple[int, int] | None = None
"""(pid, descriptor of the memory for this process's stacks)."""


def process_record() -> dict[str, Any]:
    """Return this process's location and how to read its stacks, for :func:`inspect_process` in another one."""
    pid = os.getpid()
    return {"host": _host(), "pid": pid, "started": _stat(pid)[1], "stacks": _offer_stacks()}


class Presence(Enum):
    """The presence of a process: running, ended, or on another machine."""

    THERE = "there"
    GONE = "gone"
    ELSEWHERE = "elsewhere"
    """It runs on another machine and was not inspected."""


class Sighting(NamedTuple):
    """The state of a process as far as it is visible from here."""

    presence: Presence
    text: str
    """The process's activity, in words."""
    stacks: Sequence[str] = ()
    """The lines of its stacks, if its signal handler still wrote them."""


def inspect_process(process_record: dict[str, Any]) -> Sighting:
    """Return the state of the process with this :func:`process_record`."""
    pid, host = int(process_record["pid"]), str(process_record["host"])
    if host != _host():
        return Sighting(Presence.ELSEWHERE, f"its process {pid} on {host.partition(' ')[0]} answers nothing")
    state, started = _stat(pid)
    if state == "D":  # any process is, briefly
        time.sleep(0.3)
        state, started = _stat(pid)
    if not state or started != process_record["started"]:
        return Sighting(Presence.GONE, f"its process {pid} is gone")
    if state in _STATES:
        presence = Presence.GONE if state in _ENDED else Presence.THERE
        return Sighting(presence, f"its process {pid} {_STATES[state]}")
    stacks = _ask_for_stacks(pid, process_record["stacks"])
    return Sighting(Presence.THERE, f"its process {pid} is there, but in code that holds Python's lock", stacks)


def _signal() -> int | None:
    """Return a real-time signal, which no scheduler sends; None where the platform has none."""
    lowest = getattr(signal, "SIGRTMIN", None)
    return None if sys.platform != "linux" or lowest is None else int(lowest) + 11


def _offer_stacks() -> int | None:
    """Return the descriptor into which this process writes its stacks on :func:`_signal`; None if unsupported."""
    global _own
    if _own is not None and _own[0] == os.getpid():
        return _own[1]
    signum = _signal()
    inherited = _own is not None  # a fork has its parent's handler, and writes into its parent's memory
    if signum is None or (not inherited and signal.getsignal(signum) is not signal.SIG_DFL):
        return None
    try:
        descriptor = os.memfd_create("torchhal-stacks")
        faulthandler.register(signum, file=descriptor, all_threads=True)
    except (OSError, RuntimeError, AttributeError):
        return None
    _own = (os.getpid(), descriptor)
    return descriptor


def _ask_for_stacks(pid: int, descriptor: int | None) -> list[str]:
    signum = _signal()
    if descriptor is None or signum is None:
        return []
    try:
        os.kill(pid, signum)
        deadline = time.monotonic() + 1.0
        before = -1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            with open(f"/proc/{pid}/fd/{descriptor}", errors="replace") as memory:
                text = memory.read()
            if text and len(text) == before:  # the handler has stopped writing
                return text.splitlines()
            before = len(text)
    except OSError:
        pass
    return []


def _stat(pid: int) -> tuple[str, str]:
    """Return the state's letter and the start time, which distinguishes it from a later process of the same number."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def _host() -> str:
    """Return this machine's name and its namespace of process numbers: containers of one machine have their own."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
