"""Jobs of two processes: how they are started, by whatever, and how they end when something happens to them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import scaled

HERE = Path(__file__).parent
SCRIPT = str(HERE / "scripts" / "train.py")
pytestmark = [pytest.mark.usefixtures("fairscale"), pytest.mark.timeout(240)]


class Job:
    """A program whose processes are killed in the end."""

    def __init__(self, folder, *options, launcher=()):
        folder.mkdir(exist_ok=True)
        self.folder, self.output = folder, folder / "output"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environ |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"}
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [*launcher, sys.executable, SCRIPT, str(folder), *options], env=environ, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self):
        return self.output.read_text(errors="replace")

    def pid_of(self, rank):
        """Wait for the first step of a rank."""
        path, deadline = self.folder / f"rank-{rank}", time.monotonic() + scaled(60)
        while not (path.exists() and path.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.05)
        return int(path.read_text())

    def ends(self, timeout=60):
        return self.process.wait(scaled(timeout))

    def result(self):
        assert self.ends() == 0, self.said
        return json.loads((self.folder / "result.json").read_text())


def gone(pids):
    """Wait until these processes have ended."""
    deadline = time.monotonic() + scaled(30)
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def started(name, *options, **how):
        jobs.append(Job(tmp_path / name, *options, **how))
        return jobs[-1]

    yield started
    for job in jobs:
        try:
            os.killpg(job.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for path in job.folder.glob("rank-*"):
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                pass


BOTH = pytest.mark.parametrize("strategy", ["OSS", "SDP"])
ALL = pytest.mark.parametrize("strategy", ["OSS", "SDP", "Pipe"])


@BOTH
def test_started_by_torchhal_and_by_torchrun(start, strategy):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    here = start("torchhal", strategy).result()
    elastic = start("torchrun", strategy, launcher=torchrun).result()
    assert here == elastic and here["world"] == 2


@BOTH
def test_a_killed_rank_ends_the_job(start, strategy):
    job = start("killed", strategy, "slow")
    other = job.pid_of(0)
    os.kill(job.pid_of(1), signal.SIGKILL)
    assert job.ends() != 0
    assert "SIGKILL" in job.said, job.said
    gone({other})


@ALL
def test_sigterm_saves_and_the_run_goes_on_from_there(start, strategy):
    whole = start("whole", strategy).result()
    job = start("stopped", strategy, "slow")
    job.pid_of(0)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.ends() == 128 + signal.SIGTERM, job.said
    assert "fit stopped on SIGTERM at step" in job.said
    assert start("stopped", strategy, "ckpt=last").result()["weights"] == whole["weights"]


@ALL
def test_ctrl_c_ends_every_process(start, strategy):
    job = start("interrupted", strategy, "slow")
    pids = [job.pid_of(rank) for rank in range(1 if strategy == "Pipe" else 2)]
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.ends() == -signal.SIGINT, job.said
    gone([pid for pid in pids if pid != job.process.pid])


@BOTH
def test_a_rank_that_hangs_is_named(start, strategy):
    job = start("hangs", strategy, "slow", "timeout=5")
    job.pid_of(0)
    hung = job.pid_of(1)
    os.kill(hung, signal.SIGSTOP)
    assert job.ends(90) != 0
    assert "rank 1" in job.said, job.said


def test_pipe_is_refused_in_a_job_of_several_processes(start):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    job = start("torchrun", "Pipe", launcher=torchrun)
    assert job.ends() != 0
    assert "drives all devices from one process" in job.said, job.said
