"""A job of core's ``job_processes`` takes no process for its own that an earlier one in its folder had."""

import subprocess
import sys

import pytest
from job_processes import job_starter

SCRIPT = """
import os, sys, time
from pathlib import Path

folder, rank, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
time.sleep(float(sys.argv[4]))
(folder / f"rank-{rank}").write_text(str(os.getpid()))
time.sleep(seconds)
"""


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    yield from job_starter(tmp_path, script)


@pytest.fixture
def stranger():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_the_id_of_a_rank_is_that_of_the_last_job(start):
    first = start("one", "0", "0", "0")
    assert first.ends() == 0
    second = start("one", "0", "60", "1")
    assert second.pid_of(0) == second.process.pid


def test_an_id_that_is_somebody_elses_by_now_is_not_killed(start, stranger):
    job = start("one", "0", "60", "0")
    job.pid_of(0)
    (job.folder / "rank-0").write_text(str(stranger.pid))
    job.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        stranger.wait(1)


def test_two_jobs_that_run_in_one_folder_keep_their_ids(start):
    first = start("one", "0", "60", "0")
    pid = first.pid_of(0)
    second = start("one", "1", "60", "0")
    second.pid_of(1)
    assert first.pid_of(0) == pid
    second.kill()
    assert first.ends() != 0  # of one folder, they end together
