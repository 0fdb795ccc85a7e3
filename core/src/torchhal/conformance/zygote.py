"""A process that has imported torch and nothing of a plugin, and forks a clean process whenever one is asked for.

Starting Python and importing torch takes seconds; a fork takes milliseconds. So a world of ranks costs nearly nothing
to start again, and every rank begins where no check has been.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any


class Zygote:
    """The parent's end. Started on first use; ends with this process, whatever ends that."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def fork(self, address: str, key: bytes, *, rank: int, environ: Mapping[str, str], preload: Sequence[str]) -> None:
        """Fork a process that serves at ``address``; see :func:`torchhal.conformance.world.serve`.

        The modules ``preload`` are imported once, before the fork.
        """
        if not os.path.exists(address):
            raise FileNotFoundError(address)
        request = {
            "address": address,
            "key": key.hex(),
            "rank": rank,
            "preload": list(preload),
            "environ": dict(environ),
            "path": [os.path.abspath(folder) for folder in sys.path],
            "folder": os.getcwd(),
        }
        with self._lock:
            if self._process is None or self._process.poll() is not None or self._pid != os.getpid():
                self._start()
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        # Here the plugins' folders may be anywhere on sys.path; the kit itself must be found without them.
        here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from torchhal.conformance.zygote import main; main()"],
            stdin=subprocess.PIPE,
            env=environ,
            text=True,
        )
        self._pid = os.getpid()


def main() -> None:
    """What the process does: one line of JSON, one fork, until its input ends."""
    import torch
    import torch.distributed

    import torchhal.strategies  # noqa: F401  so that no rank has to
    from torchhal.conformance.world import serve

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end is ours
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        for name in request["preload"]:
            importlib.import_module(name)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _follow(os.getppid())
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.path[:] = request["path"]
        with contextlib.suppress(OSError):
            os.chdir(request["folder"])
        try:
            serve(request["address"], bytes.fromhex(request["key"]), request["rank"])
        finally:
            os._exit(0)  # threads of a process group may abort an orderly exit


def _follow(parent: int) -> None:
    """End this process soon after its parent, whatever it waits for."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="torchhal-conformance-parent").start()
