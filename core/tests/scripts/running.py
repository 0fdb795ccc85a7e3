"""Run a job's processes with a hard time limit and find what it left behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests"))
from limits import scaled

HERE = Path(__file__).parent
JOB = str(HERE / "job.py")
TAG = "TORCHHAL_TEST_TAG"


class Job:
    """A started command; every process that descends from it carries a tag in its environment."""

    def __init__(self, *command, cwd=None, stdin=None, **variables):
        self.tag = uuid.uuid4().hex
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHHAL_", "PYTEST_"))}
        environ.update({TAG: self.tag, **{key: str(value) for key, value in variables.items()}})
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [str(part) for part in command],
            env=environ,
            cwd=cwd,
            stdin=None if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stdin = stdin

    def finish(self, timeout=120):
        """Wait for the end, then for everything that it started; sets code, out, err, seconds."""
        try:
            self.out, self.err = self.process.communicate(self.stdin, timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            self.out, self.err = self.process.communicate()
            raise AssertionError(f"still running after {timeout} s\n{self.out}\n{self.err}") from None
        self.seconds = time.monotonic() - self.started
        self.code = self.process.returncode
        self.left = self.wait_gone(6.0)
        self.kill()
        return self

    def descendants(self):
        """Living processes that carry the tag."""
        needle = f"{TAG}={self.tag}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    if state != "Z":
                        found.append(int(entry.name))
            except (OSError, IndexError):
                continue
        return found

    def wait_gone(self, timeout):
        """Processes still there after ``timeout`` seconds."""
        deadline = time.monotonic() + scaled(timeout)
        while (left := self.descendants()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def kill(self):
        for pid in [*self.descendants(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass


def job(scenario, launcher="script", *, n=2, bad=1, out="", **variables):
    return Job(sys.executable, JOB, scenario, "--launcher", launcher, "-n", n, "--bad", bad, "--out", out, **variables)


def wait_for_notes(folder, ranks, timeout=90):
    """What each rank noted in its file."""
    deadline = time.monotonic() + scaled(timeout)
    while time.monotonic() < deadline:
        try:
            return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        except (OSError, ValueError):
            time.sleep(0.05)
    raise AssertionError(f"no notes from all {ranks} ranks in {timeout} s")
