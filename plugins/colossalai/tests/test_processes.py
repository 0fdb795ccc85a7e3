"""Jobs of two processes: how they are started, and how they end when something happens to them."""

import os
import signal
import sys
from pathlib import Path

import pytest
from job_processes import job_starter, wait_for_end

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
STRATEGIES = ("ddp", "zero1", "zero2")

pytestmark = [pytest.mark.usefixtures("colossalai"), pytest.mark.timeout(240)]


@pytest.fixture
def start(tmp_path):
    yield from job_starter(tmp_path, SCRIPT)


def test_started_by_torchhal_and_by_torchrun(start):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    here = start("torchhal").result()
    elastic = start("torchrun", launcher=torchrun).result()
    assert here["weights"] == elastic["weights"]
    assert [one["world"] for one in (here, elastic)] == [2, 2]
    assert [one["environment"] for one in (here, elastic)] == ["LocalEnvironment", "TorchElasticEnvironment"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_rank_ends_the_job(start, strategy):
    job = start("killed", "slow", f"strategy={strategy}")
    other = job.pid_of(0)
    os.kill(job.pid_of(1), signal.SIGKILL)
    assert job.ends() != 0
    assert "SIGKILL" in job.said, job.said
    wait_for_end({other})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_error_of_a_rank_ends_the_job_and_is_named(start, strategy):
    job = start("fails", "fails", f"strategy={strategy}")
    assert job.ends() != 0
    assert "ValueError: the cause" in job.said and "rank 1" in job.said, job.said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sigterm_saves_and_the_run_goes_on_from_there(start, strategy):
    whole = start("whole", f"strategy={strategy}").result()
    job = start("stopped", "slow", f"strategy={strategy}")
    job.pid_of(0), job.pid_of(1)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.ends() == 128 + signal.SIGTERM, job.said
    assert "fit stopped on SIGTERM at step" in job.said
    assert start("stopped", "ckpt=last", f"strategy={strategy}").result()["weights"] == whole["weights"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_ends_every_process(start, strategy):
    job = start("interrupted", "slow", f"strategy={strategy}")
    pids = [job.pid_of(0), job.pid_of(1)]
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.ends() == -signal.SIGINT, job.said
    wait_for_end(pids)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_hangs_is_named(start, strategy):
    job = start("hangs", "slow", "timeout=5", f"strategy={strategy}")
    job.pid_of(0)
    os.kill(job.pid_of(1), signal.SIGSTOP)
    assert job.ends(90) != 0
    assert "rank 1" in job.said, job.said
