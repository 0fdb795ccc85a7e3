"""Fork the Python processes that tests start from one that has imported torch, in place of starting an interpreter.

``import torch`` and ``torch._dynamo`` cost three seconds of a core in every process, a fork 0.05. :func:`install`
replaces what ``subprocess.Popen`` and multiprocessing's spawn do to start ``sys.executable``, here and, as the server
runs it in every fork, in the processes that a test's program starts itself. The process is a real child in every way:
its parent, pid, descriptors, signals, group, environment and exit code are those that ``exec`` would have given it.

A test whose subject is the start of a process is marked ``cold_start``. A process also starts cold if its interpreter
options or environment could matter while torch is imported; with ``TORCHHAL_TESTS_COLD=1`` all do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import multiprocessing.util
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

COLD = "TORCHHAL_TESTS_COLD"
MODULES = ("torch", "torch._dynamo")
NO_TORCH = ("pip", "build", "ruff", "mypy", "venv")
"""Modules for ``-m`` that need no torch."""

IMPORT_TIME = (
    "PYTHON", "TORCH_", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "LC_",
    "LANG",
)  # fmt: skip
AT_RUN_TIME = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "OMP_NUM_THREADS", "TORCH_FR_", "TORCH_NCCL_")
"""Variables that an import reads, and those among them that the fork server applies or that torch reads later."""

LOADED_WITH_TORCH = ("HABANA", "PT_HPU")
"""With these torch's import loads a vendor's library, which sets variables itself: such a process starts cold."""

MOST_SERVERS = 3  # of some 300 MB each

# A fork that runs pytest loads this file twice: as its prelude, and by the conftest.
_INSTALLED = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_POPEN = getattr(_INSTALLED, "replaced", _INSTALLED)
_SPAWN = getattr(multiprocessing.util.spawnv_passfds, "replaced", multiprocessing.util.spawnv_passfds)  # type: ignore[attr-defined]
_PARAMETERS = inspect.signature(_POPEN)
_servers: dict[tuple[str, ...], Any] = {}
_asked: Counter[tuple[str, ...]] = Counter()
_lock = threading.Lock()
_only: Any = None
"""In a fork: the one server it has."""
_enabled = True


@contextlib.contextmanager
def only_if(enabled: bool) -> Iterator[None]:
    """Start processes warm in this block, or not."""
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before


def install(server: Any = None) -> None:
    """Start Python processes warm from now on, in a fork by its own ``server``."""
    global _only
    if sys.platform != "linux" or os.environ.get(COLD):
        return
    _only = server if server is not None else getattr(_INSTALLED, "server", None)
    if _only is not None:
        _servers[_key(os.environ)] = _only
    vars(_execute_child).update(replaced=_POPEN, server=_only)
    vars(_spawnv_passfds).update(replaced=_SPAWN)
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _spawnv_passfds  # type: ignore[attr-defined]


def _key(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted(
        f"{name}={value}"
        for name, value in environ.items()
        if name.startswith(IMPORT_TIME) and not name.startswith(AT_RUN_TIME) and value
    ))  # fmt: skip


def _server(key: tuple[str, ...], environ: Mapping[str, str]) -> Any:
    """Return the server for this environment, or None: in a fork, whose own is another, or if it isn't worth one.

    It is worth one when it is this process's own environment, or comes for the second time.
    """
    with _lock:
        _asked[key] += 1
        worth = key == _key(os.environ) or (_asked[key] > 1 and len(_servers) < MOST_SERVERS)
        if key not in _servers and _only is None and worth:
            plain = {name: value for name, value in environ.items() if not name.startswith(("TORCHHAL_", *AT_RUN_TIME))}
            _servers[key] = _fork_server_class()(MODULES, plain)
        server = _servers.get(key)
        return server if server is not None and server.usable else None


def _fork_server_class() -> Any:
    path = Path(__file__).parents[1] / "plugins/conformance/src/torchhal_conformance/_fork_server.py"
    spec = importlib.util.spec_from_file_location("warm_start_fork_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ForkServer


def _program(command: Sequence[Any]) -> tuple[list[str], list[str]] | None:
    """Return the interpreter's options and what follows them; None if no fork can run it."""
    words = [os.fsdecode(word) for word in command]
    if not words or words[0] != sys.executable:
        return None
    del words[0]
    options: list[str] = []
    while words and (words[0] in ("-u", "-B") or words[0].startswith("-W")):
        option = words.pop(0)
        options.append(f"-W{words.pop(0)}" if option == "-W" else option)
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return None
    if words[0] == "-m" and words[1].partition(".")[0] in NO_TORCH:
        return None
    if words[0].endswith("fork_server_main.py"):
        return None
    return options, words


def _fork(command: Sequence[Any], environ: Mapping[Any, Any] | None, **options: Any) -> int | None:
    """Fork a process that runs ``command`` and return its number; None if it has to be started."""
    program = _program(command) if _enabled else None
    given = {
        os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if environ is None else environ).items()
    }
    if program is None or any(name.startswith(LOADED_WITH_TORCH) for name in given):
        return None
    key = _key(given)
    server = _server(key, given)
    if server is None:
        return None
    prelude = __file__ if _only is None else ""  # one level is enough: a rank starts no ranks
    try:
        pid: int | None = server.fork(program[1], given, options=program[0], adopt=True, prelude=prelude, **options)
    except (OSError, RuntimeError):  # a standard descriptor that is closed here, a server that was killed
        return None
    return pid


def _execute_child(self: Any, *positional: Any, **named: Any) -> None:
    given = _PARAMETERS.bind(self, *positional, **named).arguments
    command = given["args"]
    command = [command] if isinstance(command, (str, bytes, os.PathLike)) else list(command)
    plain = not any(given.get(name) for name in ("preexec_fn", "shell", "executable")) and given["close_fds"]
    for name in ("gid", "gids", "uid"):
        plain = plain and given.get(name) is None
    plain = plain and given.get("umask", -1) == -1 and given.get("process_group", -1) == -1
    folder = given["cwd"] if given["cwd"] is None else os.fsdecode(given["cwd"])
    if plain and (folder is None or os.path.isdir(folder)):
        standard = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        descriptors = {number: number if own == -1 else own for number, own in enumerate(standard)}
        descriptors.update({number: number for number in given["pass_fds"]})
        pid = _fork(
            command, given["env"], folder=folder, descriptors=descriptors, new_session=given["start_new_session"]
        )
        if pid is not None:
            self.pid = pid
            self._child_created = True
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in ends))
            return
    _POPEN(self, *positional, **named)


def _spawnv_passfds(path: Any, arguments: Sequence[Any], passed: Sequence[int]) -> int:
    if "resource_tracker" not in str(arguments[-1]):
        descriptors = {number: number for number in (0, 1, 2, *passed)}
        pid = _fork([path, *arguments[1:]], None, descriptors=descriptors)
        if pid is not None:
            return pid
    return _SPAWN(path, arguments, passed)
