"""Fork new Python processes from one that has imported some modules already.

Starting Python and importing torch takes seconds, a fork takes milliseconds. :class:`ForkServer` is the client; the
server, ``_fork_server_main.py``, runs as a script, so that nothing of torchhal is imported in it unless it is asked to.

A forked process gets what ``exec`` would have given it: arguments, environment (``/proc`` shows it too), folder,
descriptors, umask, signal dispositions, process group, and a ``__main__`` of its own. What stays different: the modules
that are loaded already, the seed of ``hash()``, which all forks of a server share, and the server's resource limits,
CPU affinity and niceness.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_LENGTH: Final = struct.Struct("!I")
_MAX_DESCRIPTORS: Final = 250  # the kernel passes 253 in one message
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37
_ROOM: Final = 48 * 1024
"""Bytes that the server keeps free for the arguments, and for the environment, that ``/proc`` shows of a fork."""


class ForkServer:
    """The parent's end of a server, which starts with the first fork and ends with this process.

    Args:
        modules: imported once, before any fork.
        environ: the server's environment while it imports them; default: this process's at that time.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._modules = tuple(modules)
        self._environ = environ
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._lock = threading.Lock()

    @classmethod
    def connected(cls, end: socket.socket) -> ForkServer:
        """Return a client of the server that listens at the other end of ``end``."""
        client = cls(())
        client._socket, client._pid = end, os.getpid()
        return client

    def fork(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        folder: str | None = None,
        descriptors: Mapping[int, int] | None = None,
        new_session: bool = False,
        options: Sequence[str] = (),
        path: Sequence[str] | None = None,
        adopt: bool = False,
        prelude: str = "",
    ) -> int | None:
        """Fork a process that does what ``python ARGUMENTS`` would do.

        Args:
            arguments: those after the interpreter: ``SCRIPT ...``, ``-c CODE ...`` or ``-m MODULE ...``.
            environ: its whole environment.
            folder: its working directory; default: this process's.
            descriptors: its descriptors by number, with those of this process that they come from; default: the
                standard three. All others are closed.
            new_session: whether it begins a session, as in ``subprocess.Popen``.
            options: the interpreter's own, of which ``-u``, ``-B`` and ``-W...`` (in one word) have a meaning here.
            path: its ``sys.path``; default: what an interpreter would make of the arguments and of PYTHONPATH.
            adopt: whether it becomes a child of this process (Linux). Otherwise it is the server's, which reaps it.
            prelude: a Python file whose ``install(server)`` is called in the fork first, with a client of a server of
                the fork's own.

        Returns:
            Its process id, or None where only a fresh interpreter can do this: without ``path``, when a file beside
            the script or on PYTHONPATH has the name of a module that the server has imported.

        Raises:
            RuntimeError: the server has ended, as it does if an import fails, or the fork could not be made what it
                was to be: it printed why. The next call starts another server.
        """
        descriptors = {0: 0, 1: 1, 2: 2} if descriptors is None else descriptors
        request = {
            "arguments": list(arguments),
            "environ": dict(environ),
            "folder": os.path.abspath(folder or os.getcwd()),
            "descriptors": list(descriptors),
            "new_session": new_session,
            "options": list(options),
            "path": None if path is None else list(path),
            "parent": os.getpid() if adopt else 0,
            "prelude": prelude,
            "umask": _umask(),
            "ignored": [int(one) for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN],
            "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        with self._lock:
            try:
                end = self._connect()
                with _subreaper() if adopt else contextlib.nullcontext():
                    send(end, request, list(descriptors.values()))
                    answer, _ = receive(end)
            except ConnectionError:
                answer = None
            except BaseException:  # an unread answer would be taken for the next one's
                self._disconnect()
                raise
            if answer is None or "failed" in answer:
                self._disconnect()
                raise RuntimeError(f"no process could be forked from one that imports {', '.join(self._modules)}")
        pid: int | None = answer["pid"]
        return pid

    @property
    def usable(self) -> bool:
        """True unless this process is a fork of the one that connected."""
        return self._pid in (0, os.getpid())

    def _connect(self) -> socket.socket:
        gone = self._process is not None and self._process.poll() is not None
        if self._socket is None or gone or not self.usable:
            ours, theirs = socket.socketpair()
            with theirs:
                environ = dict(os.environ if self._environ is None else self._environ)
                script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_fork_server_main.py")
                self._process = subprocess.Popen(
                    [sys.executable, script, str(theirs.fileno()), *self._modules, " " * _ROOM],
                    stdin=subprocess.DEVNULL,
                    env=environ | {"TORCHHAL_FORK_SERVER_ROOM": " " * _ROOM},
                    pass_fds=(theirs.fileno(),),
                )
            self._socket, self._pid = ours, os.getpid()
            if receive(ours)[0] is None:  # it is ready, after seconds of importing
                raise ConnectionResetError
        return self._socket

    def _disconnect(self) -> None:
        """Let the server end. A fork's own can't be replaced: there is none as untouched any more."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        if not self._modules:
            self._pid = -1


_adopting = 0
_adopting_lock = threading.Lock()
_was_subreaper = 0


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Let this process be the parent of its descendants' orphans (Linux). All its threads share this property."""
    global _adopting, _was_subreaper
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    with _adopting_lock:
        if not _adopting:
            before = ctypes.c_int()
            prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
            _was_subreaper = before.value
            if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "no process can be adopted here")
        _adopting += 1
    try:
        yield
    finally:
        with _adopting_lock:
            _adopting -= 1
            if not _adopting:
                prctl(_PR_SET_CHILD_SUBREAPER, _was_subreaper, 0, 0, 0)


def _umask() -> int | None:
    """Return this process's umask, which Python could otherwise only read by changing it; None where /proc lacks it."""
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), None)
    except OSError:
        return None


def send(end: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message that can be written as JSON, and descriptors with it."""
    data = json.dumps(message).encode()
    data = _LENGTH.pack(len(data)) + data
    sent = socket.send_fds(end, [data], list(descriptors)) if descriptors else 0
    end.sendall(data[sent:])


def receive(end: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message and its descriptors; None when the other end has closed."""
    begin, descriptors, _, _ = socket.recv_fds(end, _LENGTH.size, _MAX_DESCRIPTORS)
    data = _fill(end, bytearray(begin), _LENGTH.size)
    if len(data) < _LENGTH.size:
        return None, descriptors
    (length,) = _LENGTH.unpack(data)
    data = _fill(end, bytearray(), length)
    return (json.loads(bytes(data)) if len(data) == length else None), descriptors


def _fill(end: socket.socket, data: bytearray, length: int) -> bytearray:
    """Read until ``data`` has ``length`` bytes or the other end has closed."""
    while len(data) < length:
        part = end.recv(length - len(data))
        if not part:
            break
        data += part
    return data
