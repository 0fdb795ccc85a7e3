"""Jobs of two processes: how they are started, by whatever, and how they end when something happens to them."""

import os
import signal
import sys
from pathlib import Path

import pytest
from job_processes import job_starter, wait_for_end

SCRIPT = Path(__file__).parent / "scripts" / "train.py"

pytestmark = [pytest.mark.usefixtures("fairscale"), pytest.mark.timeout(240)]


@pytest.fixture
def start(tmp_path):
    yield from job_starter(tmp_path, SCRIPT)


BOTH = pytest.mark.parametrize("strategy", ["OSS", "SDP"])
ALL = pytest.mark.parametrize("strategy", ["OSS", "SDP", "Pipe"])


@BOTH
def test_started_by_torchhal_and_by_torchrun(start, strategy):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    here = start("torchhal", f"strategy={strategy}").result()
    elastic = start("torchrun", f"strategy={strategy}", launcher=torchrun).result()
    assert here["weights"] == elastic["weights"] and here["world"] == elastic["world"] == 2


@BOTH
def test_a_killed_rank_ends_the_job(start, strategy):
    job = start("killed", f"strategy={strategy}", "slow")
    other = job.pid_of(0)
    os.kill(job.pid_of(1), signal.SIGKILL)
    assert job.ends() != 0
    assert "SIGKILL" in job.said, job.said
    wait_for_end({other})


@BOTH
def test_a_parameter_that_one_rank_leaves_out_in_a_step_is_named(start, strategy):
    job = start("unused", f"strategy={strategy}", "unused")
    assert job.ends() == 1
    assert "rank 1 failed: DistributedError: the parameters 'body.0." in job.said, job.said


@ALL
def test_sigterm_saves_and_the_run_goes_on_from_there(start, strategy):
    whole = start("whole", f"strategy={strategy}").result()
    job = start("stopped", f"strategy={strategy}", "slow")
    job.pid_of(0)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.ends() == 128 + signal.SIGTERM, job.said
    assert "fit stopped on SIGTERM at step" in job.said
    assert start("stopped", f"strategy={strategy}", "ckpt=last").result()["weights"] == whole["weights"]


@ALL
def test_ctrl_c_ends_every_process(start, strategy):
    job = start("interrupted", f"strategy={strategy}", "slow")
    pids = [job.pid_of(rank) for rank in range(1 if strategy == "Pipe" else 2)]
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.ends() == -signal.SIGINT, job.said
    wait_for_end([pid for pid in pids if pid != job.process.pid])


@BOTH
def test_a_rank_that_hangs_is_named(start, strategy):
    job = start("hangs", f"strategy={strategy}", "slow", "timeout=5")
    job.pid_of(0)
    hung = job.pid_of(1)
    os.kill(hung, signal.SIGSTOP)
    assert job.ends(90) != 0
    assert "rank 1" in job.said, job.said


def test_pipe_is_refused_in_a_job_of_several_processes(start):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    job = start("torchrun", "strategy=Pipe", launcher=torchrun)
    assert job.ends() != 0
    assert "drives all devices from one process" in job.said, job.said
