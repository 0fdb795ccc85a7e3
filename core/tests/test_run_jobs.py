"""Test torchhal.Run as jobs: ways to start it, stops and exact resume, checkpoints shared with the Trainer."""

import sys
from itertools import chain

import pytest
import torch
from limits import scaled
from run_jobs import assert_nothing_left, losses, plain_losses, read, run_job, seen
from tiers import slow

pytestmark = pytest.mark.slow

SHUFFLED = {"shuffle": True, "dropout": 0.2}


def script_of(launcher):
    """Return the script, its settings, and the command that starts it."""
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        return "run_straight.py", {}, [*torchrun, "--nproc-per-node", "2", "--no-python"]
    return ("run_straight.py" if launcher == "ddp" else "run_launched.py"), {"run": {"strategy": launcher}}, []


@pytest.mark.parametrize("launcher", ["ddp", "torchrun", "ddp_spawn", "ddp_fork"])
@pytest.mark.parametrize("shuffle", [False, slow(True)])
def test_two_ranks_equal_the_plain_loop(tmp_path, launcher, shuffle):
    """The losses of both ranks together are those of a loop on their samples in one process."""
    script, config, command = script_of(launcher)
    job = run_job(tmp_path, script, command=command, shuffle=shuffle, **config)
    assert job.code == 0, job.said
    ranks = [read(tmp_path, rank) for rank in range(2)]
    batches = [first["seen"] + second["seen"] for first, second in zip(*ranks, strict=True)]
    assert [len(batch) for batch in batches] == [8] * 16
    for epoch in (batches[:8], batches[8:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(64))
    if not shuffle:
        assert batches[0] == [0, 2, 4, 6, 1, 3, 5, 7]
    together = [(first + second) / 2 for first, second in zip(*(losses(rank) for rank in ranks), strict=True)]
    assert together == pytest.approx(plain_losses(batches), rel=1e-5)
    assert_nothing_left(tmp_path)


def test_one_process_equals_the_plain_loop(tmp_path):
    job = run_job(tmp_path, "run_straight.py", run={"devices": 1, "strategy": "auto"})
    assert job.code == 0 and "done 32 2" in job.said, job.said
    alone = read(tmp_path, 0)
    assert losses(alone) == plain_losses(seen(alone))


def test_straight_script_under_ddp_spawn_names_launch(tmp_path):
    job = run_job(tmp_path, "run_straight.py", run={"strategy": "ddp_spawn"})
    assert job.code == 1
    assert "LaunchError: launcher 'spawn'" in job.said and "call run.launch(function)" in job.said, job.said


def test_a_run_outlives_the_function_that_made_it(tmp_path):
    """Its end is that of the program, though nothing holds it, and ``sys.exit`` of a status of 0 is in order."""
    job = run_job(tmp_path, "run_in_function.py")
    assert job.code == 0, job.said
    assert job.said.splitlines()[-1] == "main has returned" and len(read(tmp_path, 1)) == 16, job.said


# -- stops and exact resume ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("misdeed", "code", "launcher"),
    [
        ("sigterm", 143, "ddp"),
        ("sigterm_group", 143, "ddp"),
        ("sigint_group", -2, "ddp"),  # an interpreter that a KeyboardInterrupt ends sends it to itself
        ("sigterm", 143, "ddp_spawn"),
    ],
)
def test_signal_stops_both_ranks_after_one_batch(tmp_path, misdeed, code, launcher):
    """The job that continues has the very losses of one that was left alone."""
    script, config, command = script_of(launcher)
    config.update(SHUFFLED, epochs=3)
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    assert run_job(alone, script, command=command, **config).code == 0
    job = run_job(stopped, script, command=command, misdeed=misdeed, at=10, pause=0.1, **config)
    assert job.code in (code, 130 if code == -2 else code), job.said
    name = "SIGINT" if code == -2 else "SIGTERM"
    done = len(read(stopped, 0))
    assert 11 <= done < 24 and len(read(stopped, 1)) == done, job.said
    assert f"torchhal: run stopped on {name} at step {done}; saved {stopped}/checkpoints/interrupted-" in job.said
    assert "Traceback" not in job.said
    assert_nothing_left(stopped)
    again = run_job(stopped, script, command=command, ckpt_path="last", **config)
    assert again.code == 0, again.said
    for rank in range(2):
        assert read(stopped, rank) == read(alone, rank)


def test_sigterm_to_each_rank(tmp_path):
    job = run_job(tmp_path, "run_straight.py", misdeed="sigterm", ranks=[0, 1], pause=0.1)
    assert job.code == 143, job.said
    assert len(read(tmp_path, 0)) == len(read(tmp_path, 1)) < 16
    assert len(list(tmp_path.glob("checkpoints/*.ckpt"))) == 1


@pytest.mark.parametrize("where", ["after_setup", "at_the_end"])
def test_sigterm_outside_of_the_loop(tmp_path, where):
    job = run_job(tmp_path, "run_straight.py", misdeed="sigterm", where=where, pause=0.1)
    assert job.code == 143, job.said
    done = len(read(tmp_path, 0)) if where == "at_the_end" else len(read(tmp_path, 1))
    assert done == 16 if where == "at_the_end" else done < 16
    assert f"torchhal: run stopped on SIGTERM at step {done}; saved" in job.said, job.said


@pytest.mark.parametrize("rank", [0, 1])
def test_second_ctrl_c_leaves_at_once(tmp_path, rank):
    job = run_job(tmp_path, "run_straight.py", misdeed="sigint_twice", ranks=[rank])
    assert job.code in (130, -2), job.said
    assert len(read(tmp_path, 0)) == 3 and job.since_failure < scaled(20)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_checkpoint_of_a_batch_after_sigkill(tmp_path, workers):
    """A checkpoint that the body of a batch saves continues with the next batch."""
    config = {**SHUFFLED, "workers": workers}
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert run_job(alone, "run_straight.py", **config).code == 0
    job = run_job(killed, "run_straight.py", save_at=11, misdeed="kill", at=13, **config)
    assert job.code == 1 and "rank 1 was ended by signal 9 (SIGKILL)" in job.said, job.said
    for rank in range(2):
        path = killed / f"rank{rank}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:11]))
    again = run_job(killed, "run_straight.py", ckpt_path="last", **config)
    assert again.code == 0, again.said
    for rank in range(2):
        assert read(killed, rank) == read(alone, rank)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_elastic_resume(tmp_path, before, after):
    """Another number of ranks takes the samples that are left of the epoch, in its order, each once."""
    config = {"shuffle": True, "batch_size": 8 // before}
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    first, then = ({"devices": n, "strategy": "ddp" if n > 1 else "auto"} for n in (before, after))
    assert run_job(alone, "run_straight.py", run=first, **config).code == 0
    job = run_job(
        stopped, "run_straight.py", run=first, misdeed="sigterm", ranks=[0], at=3, pause=0.1, epochs=2, **config
    )
    assert job.code == 143, job.said
    done = len(read(stopped, 0))
    assert 4 <= done < 8
    again = run_job(stopped, "run_straight.py", run=then, ckpt_path="last", shuffle=True, batch_size=8 // after)
    assert again.code == 0 and "done 16 2" in again.said, again.said

    def together(folder, ranks, begin, end):
        batches = [seen(read(folder, rank))[begin:end] for rank in range(ranks)]
        return [sorted(chain.from_iterable(batch)) for batch in zip(*batches, strict=True)]

    expected = together(alone, before, 0, 8)
    assert together(stopped, before, 0, done) == expected[:done]
    if after > 1:  # rank 1 began only then
        path = stopped / "rank1.jsonl"
        path.write_text("\n" * done + path.read_text())
    assert together(stopped, after, done, 8) == expected[done:]
    assert sorted(chain.from_iterable(together(stopped, after, 8, 16))) == list(range(64))


# -- one format for Run and Trainer --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("first", "then"), [("run_straight.py", "run_trainer.py"), ("run_trainer.py", "run_straight.py")]
)
def test_run_and_trainer_continue_each_other(tmp_path, first, then, ranks):
    config = {**SHUFFLED, "run": {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}}
    alone, other, stopped = (tmp_path / name for name in ("alone", "other", "stopped"))
    assert run_job(alone, first, **config).code == 0
    assert run_job(other, then, **config).code == 0
    assert read(alone, 0) == read(other, 0)
    job = run_job(stopped, first, misdeed="sigterm", ranks=[0], at=10, pause=0.1, **config)
    assert job.code == 143, job.said
    done = len(read(stopped, 0))
    assert done < len(read(alone, 0))
    (path,) = stopped.rglob("interrupted-*.ckpt")
    again = run_job(stopped, then, ckpt_path=str(path), **config)
    assert again.code == 0, again.said
    for rank in range(ranks):
        assert read(stopped, rank) == read(alone, rank)


def test_checkpoint_has_the_models_own_names(tmp_path):
    assert run_job(tmp_path, "run_straight.py", save_at=3, epochs=1, filepath=str(tmp_path / "a.ckpt")).code == 0
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == ["body.0.weight", "body.0.bias", "body.3.weight", "body.3.bias"]
    assert saved["global_step"] == 3
