"""Start a script as a job of several processes, read what it says, and end all of them after a test.

A plugin's tests make a fixture of :func:`job_starter`, with the script that its jobs run::

    @pytest.fixture
    def start(tmp_path):
        yield from job_starter(tmp_path, SCRIPT)

The script is called with a folder and options. It writes the process id of each rank to ``rank-N`` in that folder when
the first step is done, and rank 0 what came of the run to ``result.json``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from limits import scaled

_FOLDER = "TORCHHAL_TEST_JOB_FOLDER"
"""Environment variable of all processes of a job, by which they are distinguished from later ones with their ids."""


class Job:
    """A program in a session of its own.

    Args:
        folder: of the job; several jobs may share one.
        script: the path of a Python program.
        options: of the script, behind the folder.
        launcher: a command that starts the interpreter, such as ``("torchrun", ...)``.
        variables: added to the environment.
    """

    def __init__(
        self, folder: Path, script: str | Path, *options: str, launcher: Any = (), variables: Any = ()
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.output = folder, folder / "output"
        for path in folder.glob("rank-*"):  # of a job in this folder that has ended
            if self._running_pid(path) is None:
                path.unlink()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environ |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}", **dict(variables)}
        environ[_FOLDER] = str(folder.resolve())
        # where job_training.py is, which the script may import
        paths = [str(Path(__file__).parent), *filter(None, [environ.get("PYTHONPATH")])]
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [*launcher, sys.executable, str(script), str(folder), *options], env=environ, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """What its processes have written to standard output and error."""
        return self.output.read_text(errors="replace")

    def pid_of(self, rank: int) -> int:
        """Wait for the first step of a rank, and return the id of its process."""
        path, deadline = self.folder / f"rank-{rank}", time.monotonic() + scaled(60)
        while not (path.exists() and path.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.05)
        return int(path.read_text())

    def ends(self, timeout: float = 60) -> int:
        """Wait for the end of the process that was started; return its exit status."""
        return self.process.wait(scaled(timeout))

    def result(self) -> Any:
        """Wait for an end without an error; return what rank 0 has written."""
        assert self.ends() == 0, self.said
        return json.loads((self.folder / "result.json").read_text())

    def kill(self) -> None:
        """End all of its processes that are left."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for path in self.folder.glob("rank-*"):
            if (pid := self._running_pid(path)) is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self.process.wait(scaled(30))

    def _running_pid(self, path: Path) -> int | None:
        """Return the process id in ``path`` if a job in this folder still has that process, else None."""
        try:
            pid = int(path.read_text())
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (OSError, ValueError):  # ended, or somebody else's
            return None
        return pid if f"{_FOLDER}={self.folder.resolve()}".encode() in variables else None


def wait_for_end(pids: Any) -> None:
    """Wait until these processes have ended."""
    deadline = time.monotonic() + scaled(30)
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.05)


def job_starter(tmp_path: Path, script: str | Path) -> Iterator[Callable[..., Job]]:
    """Yield a function that starts ``script`` in a folder of that name; end all jobs that it has started.

    Args:
        tmp_path: of the test.
        script: what each job runs.
    """
    jobs: list[Job] = []

    def started(name: str, *options: str, **how: Any) -> Job:
        jobs.append(Job(tmp_path / name, script, *options, **how))
        return jobs[-1]

    yield started
    for job in jobs:
        job.kill()
