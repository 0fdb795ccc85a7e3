"""Serve :class:`~torchhal_conformance._fork_server.ForkServer`: a script that imports modules and forks processes.

``python _fork_server_main.py DESCRIPTOR MODULE... ROOM``: the descriptor is a socket's, and the room is spaces that the
arguments of a fork overwrite.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # beside this file, which is sys.path[0] of a script
    from _fork_server import ForkServer, receive, send  # type: ignore[import-not-found]
else:
    from torchhal_conformance._fork_server import ForkServer, receive, send

if sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]  # a folder whose module names must not hide anybody's

import contextlib
import ctypes
import fcntl
import gc
import importlib.machinery
import io
import linecache
import os
import runpy
import signal
import socket
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_FAULTS: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}


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
    end.set_inheritable(False)
    send(end, {"ready": True})
    _serve(end)


_own_path: list[str] = []
"""``sys.path`` without PYTHONPATH."""


def _serve(end: socket.socket) -> NoReturn:
    """Answer requests until the other end closes; a fork leaves by running its program."""
    for one in signal.valid_signals() - _FAULTS - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):  # two of the C library's own
            signal.signal(one, signal.SIG_IGN)  # meant for those that asked for the server; it ends with them
    while True:
        try:
            request, descriptors = receive(end)
        except OSError:
            request = None
        if request is None:
            os._exit(0)
        hidden = request["path"] is None and _is_hidden(request)
        answer = {"pid": None} if hidden else _fork(end, request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            send(end, answer)


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


def _fork(end: socket.socket, request: Mapping[str, Any], descriptors: list[int]) -> dict[str, Any]:
    """Fork the process, wait until it is what it was to be, and return the answer to the client."""
    reader, writer = os.pipe()
    # What comes before it has dispositions of its own must wait, not be ignored as it is here.
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - _FAULTS)
    child = os.fork()
    if not child:
        os.close(reader)
        if request["parent"]:
            # The fork of a fork that has ended is given to its nearest ancestor that takes orphans: who asked.
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                os.sched_yield()
            if os.getppid() != request["parent"]:
                os._exit(70)
        _become(end, request, descriptors, writer)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(writer)
    if request["parent"]:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)  # SIGCHLD is ignored: this waits for the end, and has nothing to return
    with os.fdopen(reader) as pipe:
        pid = pipe.read()
    return {"pid": int(pid)} if pid else {"failed": True}


# -- in a fork -----------------------------------------------------------------------------------------------


def _become(end: socket.socket, request: Mapping[str, Any], descriptors: list[int], writer: int) -> NoReturn:
    """Run the program that ``request`` describes, as a process that was started for it, and leave.

    The number of this process is written to ``writer`` before the program begins.
    """
    if request["new_session"]:
        os.setsid()
    own = _own_server(end, above=max([*request["descriptors"], 2])) if request["prelude"] else None
    try:
        end.close()
        kept = [one for one in (own.fileno() if own is not None else None, writer) if one is not None]
        writer = _set_descriptors(request["descriptors"], descriptors, kept)[-1]
        os.chdir(request["folder"])
        if request["umask"] is not None:
            os.umask(request["umask"])
        os.environ.clear()
        os.environ.update(request["environ"])
        _show_in_proc([sys.executable, *request["options"], *request["arguments"]], request["environ"])
        _open_streams("-u" in request["options"] or bool(os.environ.get("PYTHONUNBUFFERED")))
        _renew_modules(request["options"])
        if own is not None:
            _install(request["prelude"], own)
        os.write(writer, str(os.getpid()).encode())
        os.close(writer)
        _set_signals(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(70)
    _run(request["options"], request["arguments"], request["folder"], request["path"])


def _own_server(end: socket.socket, above: int) -> socket.socket:
    """Fork a server for this process alone, which is as untouched as the one that it comes from.

    The descriptor of the socket to it is larger than ``above``.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork():
        theirs.close()
        with ours:
            return socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, above + 1))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    (kept,) = _set_descriptors([], [], [theirs.detach()])
    ours.detach(), end.detach()
    _serve(socket.socket(fileno=kept))


def _set_signals(request: Mapping[str, Any]) -> None:
    ignored = {*request["ignored"], signal.SIGPIPE, signal.SIGXFSZ}  # those two by every interpreter
    for one in signal.valid_signals():
        if signal.getsignal(one) is not None and one not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(one, signal.SIG_IGN if one in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _set_descriptors(numbers: Sequence[int], received: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Let ``received`` be descriptors ``numbers`` and close all others but ``kept``; return what those are now.

    Standard ones that are not among them are the null device.
    """
    highest = max([*numbers, *received, *kept, 2]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, highest) for descriptor in received]
    kept = [
        descriptor if descriptor > max([*numbers, 2]) else fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, highest)
        for descriptor in kept
    ]
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
    return list(kept)


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


def _open_streams(unbuffered: bool) -> None:
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, f"__{name}__")
        new: Any = None
        with contextlib.suppress(OSError):
            os.fstat(number)
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


def _renew_modules(options: Sequence[str]) -> None:
    """Set what modules read from the environment or drew at random when they were imported."""
    sys.warnoptions[:] = [one for one in os.environ.get("PYTHONWARNINGS", "").split(",") if one]
    sys.warnoptions += [one[2:] for one in options if one.startswith("-W")]
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


def _run(options: Sequence[str], arguments: Sequence[str], folder: str, search: Sequence[str] | None) -> NoReturn:
    """Run ``arguments`` as the interpreter would, and end this process as it would."""
    first, rest = arguments[0], list(arguments[1:])
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if "multiprocessing" in sys.modules:
        sys.modules["__mp_main__"] = main  # what a spawned process calls it
    main.__dict__.update(__builtins__=sys.modules["builtins"], __loader__=importlib.machinery.BuiltinImporter)
    sys.orig_argv = [sys.executable, *options, *arguments]
    sys.argv = list(arguments)
    script = os.path.join(folder, first)
    import_from = "" if first == "-c" else folder if first == "-m" else os.path.dirname(os.path.realpath(script))
    if not first.startswith("-") and os.path.isdir(script):
        import_from = script
    entries = [os.path.join(folder, entry) for entry in _python_path(os.environ)]
    first_entry = [] if getattr(sys.flags, "safe_path", False) else [import_from]
    sys.path[:] = [*first_entry, *dict.fromkeys([*entries, *_own_path])] if search is None else search
    importlib.invalidate_caches()
    try:
        if first == "-m":
            sys.argv = ["-m", *rest[1:]]
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            if sys.version_info >= (3, 13):  # whose tracebacks show the lines of a -c
                linecache.cache["<string>"] = (len(rest[0]), None, rest[0].splitlines(keepends=True), "<string>")
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
