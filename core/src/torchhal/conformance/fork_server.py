"""A process that has imported some modules and forks new Python processes from itself.

Starting Python and importing torch takes seconds, a fork takes milliseconds. :class:`ForkServer` is the parent's end;
the server runs this file as a script, so that nothing of torchhal is imported in it unless it is asked to.

A forked process gets what ``exec`` would have given it: arguments, environment (``/proc`` shows it too), folder,
descriptors, signal dispositions, process group, and a ``__main__`` of its own. What stays different: the modules that
are loaded already, the seed of ``hash()``, which all forks of a server share, and resource limits.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose module names must not hide anybody's

import contextlib
import ctypes
import gc
import importlib.machinery
import io
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

_LENGTH: Final = struct.Struct("!I")
_MAX_DESCRIPTORS: Final = 250  # the kernel passes 253 in one message
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
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
            path: its ``sys.path``; default: what an interpreter would make of the arguments and of PYTHONPATH.
            adopt: whether it becomes a child of this process (Linux). Otherwise it is the server's, which reaps it.
            prelude: a Python file whose ``install(server)`` is called in the fork first, with a client of a server of
                the fork's own.

        Returns:
            Its process id, or None where only a fresh interpreter can do this: without ``path``, when a file beside
            the script or on PYTHONPATH has the name of a module that the server has imported.

        Raises:
            RuntimeError: the server has ended, as it does if an import fails: it printed why.
        """
        descriptors = {0: 0, 1: 1, 2: 2} if descriptors is None else descriptors
        request = {
            "arguments": list(arguments),
            "environ": dict(environ),
            "folder": os.path.abspath(folder or os.getcwd()),
            "descriptors": list(descriptors),
            "new_session": new_session,
            "path": None if path is None else list(path),
            "adopt": adopt,
            "prelude": prelude,
            "ignored": [int(one) for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN],
            "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        with self._lock:
            end = self._connect()
            with _subreaper() if adopt else contextlib.nullcontext():
                try:
                    _send(end, request, list(descriptors.values()))
                    answer, _ = _receive(end)
                except ConnectionError:
                    answer = None
        if answer is None:
            raise RuntimeError(f"the process that forks others has ended (it imports {', '.join(self._modules)})")
        pid: int | None = answer["pid"]
        return pid

    @property
    def usable(self) -> bool:
        """Whether this process may ask: a fork of the one that connected may not."""
        return self._pid in (0, os.getpid())

    def _connect(self) -> socket.socket:
        gone = self._process is not None and self._process.poll() is not None
        if self._socket is None or gone or not self.usable:
            ours, theirs = socket.socketpair()
            with theirs:
                environ = dict(os.environ if self._environ is None else self._environ)
                command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), *self._modules]
                self._process = subprocess.Popen(
                    [*command, " " * _ROOM],
                    stdin=subprocess.DEVNULL,
                    env=environ | {"TORCHHAL_FORK_SERVER_ROOM": " " * _ROOM},
                    pass_fds=(theirs.fileno(),),
                )
            self._socket, self._pid = ours, os.getpid()
        return self._socket


@contextlib.contextmanager
def _subreaper() -> Any:
    """Let this process be the parent of its descendants' orphans (Linux)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no process can be adopted here")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _send(end: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(end, [_LENGTH.pack(len(data))], list(descriptors))
    end.sendall(data)


def _receive(end: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message and its descriptors; None when the other end has closed."""
    header, descriptors, _, _ = socket.recv_fds(end, _LENGTH.size, _MAX_DESCRIPTORS)
    while header and len(header) < _LENGTH.size:
        header += end.recv(_LENGTH.size - len(header))
    if not header:
        return None, descriptors
    (length,) = _LENGTH.unpack(header)
    data = bytearray()
    while len(data) < length:
        part = end.recv(length - len(data))
        if not part:
            return None, descriptors
        data += part
    return json.loads(bytes(data)), descriptors


# -- in the server -------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Import the modules named after the first argument, a socket's descriptor, and serve it."""
    end = socket.socket(fileno=int(arguments[0]))
    for name in arguments[1:-1]:
        importlib.import_module(name)
    if "torch" in sys.modules and os.environ.get("OMP_NUM_THREADS") is None:
        sys.modules["torch"].get_num_threads()  # the default is read from the machine, once
    gc.freeze()  # a collection in a fork would copy every page
    global _own_path
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    _own_path = [entry for entry in sys.path if entry not in {os.path.abspath(one) for one in path if one}]
    _serve(end)


_own_path: list[str] = []
"""``sys.path`` without PYTHONPATH."""


def _serve(end: socket.socket) -> None:
    """Answer requests until the other end closes; a fork leaves by running its program."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(one, signal.SIG_IGN)  # meant for those that asked for the server; it ends with them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    end.set_inheritable(False)
    while True:
        try:
            request, descriptors = _receive(end)
        except OSError:
            request = None
        if request is None:
            os._exit(0)
        pid = None if request["path"] is None and _is_hidden(request) else _fork(end, request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            _send(end, {"pid": pid})


def _is_hidden(request: Mapping[str, Any]) -> bool:
    """Return whether a module that is loaded here would come from another file in a fresh process."""
    loaded = {name for name in sys.modules if "." not in name} | {"sitecustomize", "usercustomize"}
    loaded.discard("__main__")
    first, *_ = request["arguments"]
    folders = [os.path.join(request["folder"], entry) for entry in _python_path(request["environ"])]
    script = os.path.join(request["folder"], first)
    if not first.startswith("-") and not os.path.isdir(script):
        folders.append(os.path.dirname(os.path.realpath(script)))
    else:
        folders.append(script if os.path.isdir(script) else request["folder"])
    for folder in folders:
        if folder in _own_path:
            continue
        with contextlib.suppress(OSError):
            if any(name.partition(".")[0] in loaded and _is_module(folder, name) for name in os.listdir(folder)):
                return True
    return False


def _is_module(folder: str, name: str) -> bool:
    """Return whether a file of this name can be imported; a folder counts if it is a package."""
    if name.endswith((".py", ".so", ".pyc")):
        return True
    return "." not in name and os.path.exists(os.path.join(folder, name, "__init__.py"))


def _python_path(environ: Mapping[str, str]) -> list[str]:
    return [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _fork(end: socket.socket, request: Mapping[str, Any], descriptors: list[int]) -> int:
    if not request["adopt"]:
        if pid := os.fork():
            return pid
        _become(end, request, descriptors)
    # The fork of a fork that has ended is given to its nearest ancestor that takes orphans: the process that asked.
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        between = os.getpid()
        if pid := os.fork():
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        while os.getppid() == between:
            os.sched_yield()
        _become(end, request, descriptors)
    os.close(writer)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(between, 0)  # SIGCHLD is ignored: this waits for the end, and has nothing to return
    with os.fdopen(reader) as pipe:
        return int(pipe.read())


# -- in a fork -----------------------------------------------------------------------------------------------


def _become(end: socket.socket, request: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
    """Run the program that ``request`` describes, as a process that was started for it, and leave."""
    if request["new_session"]:
        os.setsid()
    own = _own_server(end) if request["prelude"] else None
    try:
        end.close()
        _set_signals(request)
        kept = [own.fileno()] if own is not None else []
        _set_descriptors(request["descriptors"], descriptors, kept)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environ"])
        _show_in_proc([sys.executable, *request["arguments"]], request["environ"])
        _open_streams()
        _renew_modules()
        if own is not None:
            _install(request["prelude"], own)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(70)
    _run(request["arguments"], request["folder"], request["path"])


def _own_server(end: socket.socket) -> socket.socket:
    """Fork a server for this process alone, which is as untouched as the one that it comes from."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return ours
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    kept = os.dup(theirs.fileno())
    _set_descriptors([], [], [kept])
    ours.detach(), theirs.detach(), end.detach()
    _serve(socket.socket(fileno=kept))
    os._exit(0)


def _set_signals(request: Mapping[str, Any]) -> None:
    ignored = {*request["ignored"], signal.SIGPIPE, signal.SIGXFSZ}  # those two by every interpreter
    for one in signal.valid_signals():
        if signal.getsignal(one) is not None and one not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(one, signal.SIG_IGN if one in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _set_descriptors(numbers: Sequence[int], received: Sequence[int], kept: Sequence[int]) -> None:
    """Let ``received`` be descriptors ``numbers``, leave ``kept`` open and close all others.

    Standard ones that are not among them are the null device.
    """
    import fcntl

    highest = max([*numbers, *received, *kept, 2]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, highest) for descriptor in received]
    open_ones = [int(name) for name in os.listdir("/dev/fd" if sys.platform != "linux" else "/proc/self/fd")]
    for descriptor in open_ones:
        if descriptor not in kept and descriptor not in moved:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    for number, descriptor in zip(numbers, moved, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for standard in range(3):
        if standard not in numbers:
            null = os.open(os.devnull, os.O_RDWR)
            if null != standard:
                os.dup2(null, standard)
                os.close(null)


def _show_in_proc(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Overwrite the arguments and the environment that the server was started with: ``/proc/PID`` reads them there."""
    if sys.platform != "linux":
        return
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    arguments_start, arguments_end, environ_start, environ_end = (int(field) for field in fields[45:49])
    shown = (
        (arguments_start, arguments_end, command),
        (environ_start, environ_end, [f"{name}={value}" for name, value in environ.items()]),
    )
    for start, stop, words in shown:
        data = b"".join(os.fsencode(word) + b"\0" for word in words)[: stop - start - 1]
        ctypes.memmove(start, data.ljust(stop - start, b"\0"), stop - start)


def _open_streams() -> None:
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, f"__{name}__")
        new: Any = None
        with contextlib.suppress(OSError):
            os.fstat(number)
            unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
            size = 0 if unbuffered and mode == "w" else -1
            file: Any = open(number, f"{mode}b", buffering=size, closefd=False)  # noqa: SIM115
            getattr(file, "raw", file).name = f"<{name}>"
            new = io.TextIOWrapper(
                file,
                encoding=getattr(old, "encoding", "utf-8"),
                errors="backslashreplace" if name == "stderr" else getattr(old, "errors", "strict"),
                newline=None if name == "stdin" else "\n",
                line_buffering=not unbuffered and (name == "stderr" or file.isatty()),
                write_through=unbuffered,
            )
            new.mode = mode
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _renew_modules() -> None:
    """Set what modules read from the environment or drew at random when they were imported."""
    if options := os.environ.get("PYTHONWARNINGS"):
        sys.warnoptions[:] = options.split(",")
        import warnings

        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        sys.modules["torch"].set_num_threads(max(1, int(threads)))
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _install(path: str, own: socket.socket) -> None:
    module = types.ModuleType(os.path.basename(path).removesuffix(".py"))
    module.__file__ = path
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
    module.install(ForkServer.connected(own))


def _run(arguments: Sequence[str], folder: str, search: Sequence[str] | None) -> NoReturn:
    """Run ``arguments`` as the interpreter would, and end this process as it would."""
    first, rest = arguments[0], list(arguments[1:])
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if "multiprocessing" in sys.modules:
        sys.modules["__mp_main__"] = main  # what a spawned process calls it
    main.__dict__.update(__builtins__=sys.modules["builtins"], __loader__=importlib.machinery.BuiltinImporter)
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = list(arguments)
    script = os.path.join(folder, first)
    import_from = "" if first == "-c" else folder if first == "-m" else os.path.dirname(os.path.realpath(script))
    if not first.startswith("-") and os.path.isdir(script):
        import_from = script
    entries = [os.path.join(folder, entry) for entry in _python_path(os.environ)]
    sys.path[:] = [import_from, *dict.fromkeys([*entries, *_own_path])] if search is None else search
    importlib.invalidate_caches()
    import runpy

    try:
        if first == "-m":
            sys.argv = ["-m", *rest[1:]]
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif os.path.isdir(script):
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            main.__dict__.update(__file__=script, __spec__=None, __cached__=None)
            main.__dict__["__loader__"] = importlib.machinery.SourceFileLoader("__main__", script)
            with open(script, "rb") as file:
                code = compile(file.read(), main.__dict__["__file__"], "exec")
            exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        # The interpreter prints a traceback that begins in the program.
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace is not None else None
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None
            raise
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
