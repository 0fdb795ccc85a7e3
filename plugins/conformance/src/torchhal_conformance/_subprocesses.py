"""Start programs as a user would, and collect their exit codes, output and left-over processes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchhal_conformance._check import CheckFailed
from torchhal_conformance._launcher_env import variables
from torchhal_conformance._limits import scaled

TAG: Final = "TORCHHAL_CONFORMANCE_JOB"
"""In every process of a job, as its descendants inherit the environment."""
START: Final = 120.0
"""Seconds that a job of two processes may take; most of them import torch."""
PATIENCE: Final = 5.0
"""Seconds that what a job has started may take to end after it."""


@dataclass(frozen=True)
class CompletedJob:
    """Result of a job: ``code`` is negative for a signal, and ``left`` are processes that had to be killed."""

    code: int
    output: str
    left: tuple[int, ...]


class Job:
    """Started program whose output goes to a file, so that none of its processes can block on a pipe."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """Start ``command`` in ``folder``, which exists; no launcher's variables are set."""
        self._tag = uuid.uuid4().hex
        self._written = folder / f"output-{self._tag}"
        with variables(), open(self._written, "wb") as output:
            environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
            environ |= {TAG: self._tag, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}
            self._process = subprocess.Popen(
                list(command), cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def finish(self, timeout: float) -> CompletedJob:
        """Wait for the program and its descendants to end, and kill those that are left.

        Raises:
            CheckFailed: it is still running after ``timeout`` seconds.
        """
        timeout = scaled(timeout)
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise CheckFailed(f"the program HANGS: it runs after {timeout:g} s\n{self.output()}") from None
        deadline = time.monotonic() + scaled(PATIENCE)
        while (left := self._descendants()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        return CompletedJob(code, self.output(), tuple(left))

    def kill(self) -> None:
        """Kill the program and its descendants."""
        own = [self._process.pid] if self.running else []
        kill_all({*own, *self._descendants()})
        self._process.wait()

    def output(self) -> str:
        """Return the last 6000 characters of stdout and stderr."""
        return self._written.read_text(encoding="utf-8", errors="replace")[-6000:].strip()

    def _descendants(self) -> list[int]:
        return processes_with(TAG, self._tag)


def processes_with(name: str, value: str) -> list[int]:
    """Return the living processes that began with the variable; none where there is no /proc."""
    needle, found = f"{name}={value}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if needle not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes, of which some may have ended."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


def call(folder: Path, function: Callable[..., None], *arguments: Any) -> list[str]:
    """Return the command of a program that calls ``function(*arguments)``, which it imports by its name."""
    spec = folder / f"call-{uuid.uuid4().hex}"
    spec.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
    return [sys.executable, "-m", "torchhal_conformance._job_entry", str(spec)]
