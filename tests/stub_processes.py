"""Processes for the tests of plugins whose vendor's library is a stub: one that was imported stays in a process, and
whoever wants it says so in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(wanted: str, variables: dict[str, Any], dropped: Collection[str] = ()) -> dict[str, str]:
    """This process's environment without a launcher's variables and ``dropped``, with the variable that wants the stub
    and with ``variables``; None takes one away."""
    own = {name: value for name, value in os.environ.items() if name not in (*_LAUNCHERS, *dropped)}
    changed = {"OMP_NUM_THREADS": "1", wanted: "1", **variables}
    own.update({name: str(value) for name, value in changed.items() if value is not None})
    return {name: value for name, value in own.items() if name not in changed or changed[name] is not None}


def run(
    scripts: Path, what: str, arguments: Collection[Any], *, env: dict[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """A script of the folder ``scripts``, or a piece of code, in a process of its own; the finished process."""
    command = [str(scripts / what)] if what.endswith(".py") else ["-c", what]
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def output(done: subprocess.CompletedProcess[str]) -> str:
    """What it printed; AssertionError with it if it failed."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
