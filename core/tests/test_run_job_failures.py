"""Test how jobs on torchhal.Run end with a failure: on all ranks, soon, with its cause shown once."""

import itertools
import sys

import pytest
from limits import scaled
from run_jobs import assert_nothing_left, read, run_job

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
SOON = 15
"""Seconds, on an idle machine, after which no rank may be left."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("script", "strategy", "where"),
    [
        ("run_straight.py", "ddp", "step"),
        ("run_straight.py", "ddp", "after_setup"),
        ("run_launched.py", "ddp", "step"),
        ("run_launched.py", "ddp_spawn", "step"),
    ],
)
def test_error_on_one_rank(tmp_path, rank, script, strategy, where):
    job = run_job(tmp_path, script, misdeed="raise", ranks=[rank], where=where, run={"strategy": strategy})
    assert job.code == 1 and job.since_failure < scaled(SOON), job.said
    assert job.said.count("ZeroDivisionError(f") == 1, job.said  # the line of the script in the traceback
    assert f"rank {rank} failed: ZeroDivisionError: rank {rank} is broken" in job.said
    assert "Connection" not in job.said and "_subprocess_entry.py" not in job.said, job.said
    assert_nothing_left(tmp_path)


def test_error_on_one_rank_under_torchrun(tmp_path):
    job = run_job(tmp_path, "run_straight.py", command=TORCHRUN, misdeed="raise")
    assert job.code == 1 and job.since_failure < scaled(SOON), job.said
    assert job.said.count("ZeroDivisionError(f") == 1 and "Connection" not in job.said, job.said
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("misdeed", "rank", "code", "said"),
    [
        ("os_exit", 1, 1, "rank 1 exited with code 0 in the midst of the run"),
        ("kill", 1, 1, "rank 1 was ended by signal 9 (SIGKILL)"),
        ("kill", 0, -9, "rank 0 (process "),
        ("abort", 0, -6, "C++ code gave up"),
        ("abort", 1, 1, "C++ code gave up"),
    ],
)
def test_rank_that_vanishes(tmp_path, misdeed, rank, code, said):
    job = run_job(tmp_path, "run_straight.py", misdeed=misdeed, ranks=[rank])
    assert job.code == code and job.since_failure < scaled(SOON), job.said
    assert said in job.said and "Traceback" not in job.said, job.said
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_hangs(tmp_path, rank):
    limit = scaled(12)
    job = run_job(tmp_path, "run_straight.py", misdeed="hang", ranks=[rank], collective_timeout=limit)
    assert job.code == 1 and limit * 0.9 < job.since_failure < limit + scaled(SOON), job.said
    assert f"rank {rank} did not" in job.said or f"rank {rank} is still here" in job.said, job.said
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("where", ["step", "at_the_end"])
def test_exit_on_all_ranks(tmp_path, where):
    """An exit inside of a run is a failure, with any status but 0, as inside of the Trainer's fit."""
    job = run_job(tmp_path, "run_straight.py", misdeed="sys_exit", ranks=[0, 1], where=where)
    assert job.code not in (0, None) and job.since_failure < scaled(SOON), job.said
    assert job.said.count("called sys.exit(3)") == 1, job.said
    assert_nothing_left(tmp_path)


def test_exit_on_one_rank(tmp_path):
    job = run_job(tmp_path, "run_straight.py", misdeed="sys_exit", code=1)
    assert job.code == 1 and job.since_failure < scaled(SOON), job.said
    assert "rank 1 called sys.exit(1)" in job.said and "Connection" not in job.said, job.said
    assert_nothing_left(tmp_path)


def test_exit_at_the_end_in_order(tmp_path):
    job = run_job(tmp_path, "run_straight.py", misdeed="sys_exit", code=0, ranks=[0, 1], where="at_the_end")
    assert job.code == 0 and "sys.exit" not in job.said, job.said


@pytest.mark.parametrize(("rank", "ends"), list(itertools.product([0, 1], [True, False])))
def test_error_behind_the_loop(tmp_path, rank, ends):
    job = run_job(tmp_path, "run_straight.py", misdeed="raise", ranks=[rank], where="at_the_end", ends=ends)
    assert job.code == 1 and job.since_failure < scaled(SOON), job.said
    assert job.said.count("ZeroDivisionError(f") == 1, job.said
    assert len(read(tmp_path, 0)) == len(read(tmp_path, 1)) == 16
    assert_nothing_left(tmp_path)


def test_one_batch_more_on_one_rank(tmp_path):
    job = run_job(tmp_path, "run_straight.py", longer=4, run={"use_distributed_sampler": False})
    assert job.code == 1 and "every rank must train on the same number of batches" in job.said, job.said
    assert "rank 0: 16, rank 1: 17" in job.said, job.said
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("misdeed", ["sigterm", "os_exit"])
def test_rank_that_vanishes_behind_its_run(tmp_path, misdeed):
    """Rank 0, which serves the store until all have signed off, doesn't wait for one that can't."""
    job = run_job(tmp_path, "run_straight.py", misdeed=misdeed, where="at_the_end", ends=True)
    assert job.code == (143 if misdeed == "sigterm" else 0) and job.since_failure < scaled(SOON), job.said
    assert "done 16 2" in job.said and "Traceback" not in job.said, job.said
    assert_nothing_left(tmp_path)


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["/proc/no", "file"])
def test_checkpoint_that_cannot_be_written(tmp_path, folder):
    """Every rank fails with the reason, whoever writes."""
    (tmp_path / "file").write_text("")
    path = f"{folder}/a.ckpt" if folder.startswith("/") else str(tmp_path / folder / "a.ckpt")
    job = run_job(tmp_path, "run_straight.py", save_at=3, filepath=path)
    assert job.code == 1, job.said
    assert "CheckpointError" in job.said and path in job.said and "Connection" not in job.said, job.said
    assert len(read(tmp_path, 0)) == len(read(tmp_path, 1)) == 3


@pytest.mark.parametrize("misdeed", [None, "sigterm"])
def test_folder_that_cannot_be_written_to(tmp_path, misdeed):
    """It stops no rank of a loop that saves nothing; a signal stops all, and says that nothing was saved."""
    (tmp_path / "file").write_text("")
    run = {"default_root_dir": str(tmp_path / "file" / "folder")}
    job = run_job(tmp_path, "run_straight.py", misdeed=misdeed, run=run)
    assert job.code == (0 if misdeed is None else 143) and "can't be written to" in job.said, job.said
    assert "Traceback" not in job.said, job.said


def test_checkpoint_without_space_left(tmp_path):
    """It is caught on both ranks, the one before is intact, and the loop goes on."""
    job = run_job(tmp_path, "run_full_disk.py")
    assert job.code == 0, job.said
    assert sorted(line for line in job.said.splitlines() if line.startswith("rank")) == [
        "rank 0: CheckpointError No space left on device", "rank 1: CheckpointError No space left on device",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.glob("checkpoints/*.ckpt")] == ["epoch=0-step=4.ckpt"]


@pytest.mark.parametrize("ckpt_path", ["last", "its path"])
def test_truncated_checkpoint(tmp_path, ckpt_path):
    """By its path it is an error; "last" takes complete ones alone, and begins anew where there is none."""
    alone = {"run": {"devices": 1, "strategy": "auto"}}
    assert run_job(tmp_path, "run_straight.py", save_at=5, **alone).code == 0
    (path,) = tmp_path.glob("checkpoints/*.ckpt")
    path.write_bytes(path.read_bytes()[:-200])
    job = run_job(tmp_path, "run_straight.py", ckpt_path="last" if ckpt_path == "last" else str(path), **alone)
    if ckpt_path == "last":
        assert job.code == 0 and len(read(tmp_path, 0)) == 64, job.said
        assert "run_straight.py:" in job.said and "training starts from the beginning" in job.said, job.said
    else:
        assert job.code == 1, job.said
        assert f"CheckpointCorruptError: '{path}' is damaged" in job.said, job.said
        assert "run_straight.py" in job.said and job.said.count("Traceback") == 1, job.said
