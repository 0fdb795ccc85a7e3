"""Provide what launchers need of processes: their variables, signals and final exit. Imports no torch.

A child's entry point imports this before the user's script runs, and a script may still set variables that
torch reads when it is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping

__all__ = [
    "LAUNCH_ID",
    "LAUNCH_KIND",
    "PARENT_IS_MAIN",
    "PARENT_PID",
    "REPORT_FD",
    "describe_exit",
    "finish",
    "launched_by",
    "leave",
    "rank_variables",
    "threads_per_process",
    "without_external",
    "write_stderr",
]

LAUNCH_ID = "TORCHHAL_LAUNCH_ID"
"""Set in every process that a torchhal launcher starts, and nowhere else: RANK and its like may be left over in a
shell, this can't be."""

LAUNCH_KIND = "TORCHHAL_LAUNCH_KIND"
"""The launcher's name, beside :data:`LAUNCH_ID`."""

PARENT_PID = "TORCHHAL_PARENT_PID"
"""The process whose end means the end of this one."""

PARENT_IS_MAIN = "TORCHHAL_PARENT_IS_MAIN"
"""``"1"`` when the parent's main thread started this process."""

REPORT_FD = "TORCHHAL_REPORT_FD"
"""File descriptor to which a child writes why it failed, for its parent."""

_EXTERNAL = ("TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
"""Variables of an outer torchrun: in a process that torchhal starts they would be wrong."""

_exit_hooks: list[Callable[[], None]] = []


def rank_variables(
    *,
    launch_id: str,
    kind: str,
    rank: int,
    local_rank: int,
    node_rank: int,
    world_size: int,
    local_world_size: int,
    address: str,
    port: int,
    threads: int | None = None,
) -> dict[str, str]:
    """Return the variables of one started process."""
    variables = {
        LAUNCH_ID: launch_id,
        LAUNCH_KIND: kind,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(node_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def without_external(environ: MutableMapping[str, str]) -> None:
    """Remove an outer launcher's variables, which describe the process that starts this one."""
    for name in [name for name in environ if name.startswith(_EXTERNAL)]:
        del environ[name]


def launched_by(environ: Mapping[str, str] = os.environ) -> str | None:
    """Name of the torchhal launcher that started this process; None if none did."""
    if not environ.get(LAUNCH_ID):
        return None
    return environ.get(LAUNCH_KIND, "")


def threads_per_process(num_processes: int) -> int | None:
    """Return the CPU threads each of ``num_processes`` should use; None if the user has set OMP_NUM_THREADS."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        cores = os.cpu_count() or 1
    return max(1, cores // max(1, num_processes))


def describe_exit(code: int) -> str:
    """Return a return code of ``subprocess``/``multiprocessing`` in words: negative is a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ""
    if -code == getattr(signal, "SIGKILL", 9):
        hint = " (often the kernel's answer to too little memory)"
    elif -code == signal.SIGABRT:
        hint = " (C++ code gave up: with gloo often as ranks sent each other tensors of different sizes)"
    return f"was ended by signal {-code} ({name}){hint}"


def exit_status(code: object) -> int:
    """Return the process status that ``SystemExit(code)`` means."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    return 1


def is_signal_status(status: int) -> bool:
    """Return whether ``status`` is that of a process that a signal ended: 128 and the signal's number."""
    try:
        return status > 128 and bool(signal.Signals(status - 128))
    except ValueError:
        return False


def stop_signal(returncode: int) -> int | None:
    """Return the signal that requested the end of a process with this ``returncode`` of ``subprocess``, if one did."""
    if -returncode in (signal.SIGINT, signal.SIGTERM):  # before its handlers were installed
        return -returncode
    return returncode - 128 if is_signal_status(returncode) else None


def die_with_parent(parent_pid: int, *, by_kernel: bool = True) -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies, in any state of this process.

    The kernel observes the parent's *thread* that started this process, so this is called only if that was the main
    thread; otherwise :func:`watch_parent` polls. A parent that died earlier is detected here.
    """
    if by_kernel and sys.platform == "linux":
        try:
            ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1: PR_SET_PDEATHSIG
        except (OSError, AttributeError):
            pass
    if os.getppid() != parent_pid:
        leave(1)


def watch_parent(parent_pid: int, what: str, interval: float = 0.5) -> None:
    """Exit when the parent has ended, without kernel support. Starts a daemon thread."""

    def poll() -> None:
        never = threading.Event()
        while os.getppid() == parent_pid:
            never.wait(interval)
        write_stderr(f"torchhal: {what} (pid {parent_pid}) is gone; process {os.getpid()} leaves.\n")
        leave(1)

    threading.Thread(target=poll, name="torchhal-parent", daemon=True).start()


def write_stderr(text: str) -> None:
    """Write to stderr in one piece, in any state of ``sys.stderr``."""
    try:
        sys.stderr.flush()
        stream = sys.__stderr__ if sys.stderr is None else sys.stderr
        if stream is not None:
            stream.write(text)
            stream.flush()
    except Exception:
        write_descriptor_2(text.encode(errors="replace"))


def write_descriptor_2(data: bytes) -> None:
    """Write to stderr's descriptor, if this process was started with one: else the number belongs to another file."""
    if sys.__stderr__ is not None:
        try:
            os.write(2, data)
        except OSError:
            pass


def open_standard_descriptors() -> None:
    """Open the null device for those of the descriptors 0 to 2 that are closed.

    Their numbers would be given to the next files, sockets and pipes: C++ code would write its warnings into a
    checkpoint, and a child process would take the pipe of its report for its stdout.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is this one


def flush() -> None:
    """Flush the buffers that ``os._exit`` would discard."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except Exception:  # a closed pipe must not prevent the exit
            pass


def on_leave(hook: Callable[[], None]) -> None:
    """Call ``hook`` before :func:`leave` ends this process: it must be quick and may not raise."""
    if hook not in _exit_hooks:
        _exit_hooks.append(hook)


def leave(code: int) -> None:
    """End this process now, from any thread, without the interpreter's finalization."""
    for hook in list(_exit_hooks):
        try:
            hook()
        except BaseException:
            pass
    flush()
    os._exit(code)


def settle_threads(at_least: float = 0.05, at_most: float = 1.0) -> None:
    """Let other threads finish their current work before the interpreter finalizes.

    A gloo thread that was interrupted between completing its last work and dropping the tensors does the latter
    while Python finalizes, and aborts the process (``terminate called without an active exception``): 2 of some 25
    runs of two busy ranks under torchrun, though the process group was destroyed. A sleep gives up Python's lock;
    after it no thread may be runnable.
    """
    deadline = time.monotonic() + at_most
    time.sleep(at_least)
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        quiet = 0 if _others_run() else quiet + 1
        time.sleep(0.005)


def _others_run() -> bool:
    me = threading.get_native_id()
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/stat") as stat:
                if int(task) != me and stat.read().rsplit(")", 1)[1].split()[0] == "R":
                    return True
    except (OSError, IndexError, ValueError):  # no /proc, or a thread that has just ended
        pass
    return False


_finishing: int | None = None
"""The status with which :func:`finish` is ending this process."""


def keep_exit_handlers() -> None:
    """Let :func:`finish` run the exit handlers that are registered from here on, and none of before.

    For a fork, which has its parent's. They are not cleared either: what they alone keep, a connection or the threads
    of a library, would be freed in a process that has no such threads, and that has ended in a segmentation fault.
    """
    atexit.register(_end_finishing)


def _end_finishing() -> None:
    """End the process in the place of the handlers that were registered earlier, which Python runs after this one."""
    if _finishing is not None:
        flush()
        os._exit(_finishing)


def finish(code: int) -> None:
    """End a process started by a launcher, after its work: all that the interpreter does at exit, except finalization.

    A worker thread of gloo may drop the last reference to a tensor while Python finalizes, and aborts the process
    then (``terminate called without an active exception``) although its work is done. Threads are joined, exit
    handlers run and streams are flushed as usual; only then the process leaves by ``os._exit``.
    """
    global _finishing
    _finishing = code
    try:
        shutdown = getattr(threading, "_shutdown", None)
        if shutdown is not None:
            shutdown()
        run = getattr(atexit, "_run_exitfuncs", None)
        if run is not None:
            run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        flush()
        os._exit(code)
