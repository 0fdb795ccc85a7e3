"""What happens when a rank fails, dies, hangs or is asked to stop: real processes, both kinds of launcher.

All jobs run in the background, a few at a time, and each test reads its own: most of a job is waiting.
"""

import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from running import JOB, Job, job, wait_for_notes

GONE_WITHIN = 300.0
"""Seconds from a rank's failure until every process is gone: a few, unless the machine has much else to do. Whoever
waits in vain sleeps for twice as long."""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def plain(scenario, launcher, **options):
    """Run a job to its end; ``after_failure`` is how long everything took to be gone."""
    with tempfile.TemporaryDirectory() as folder:
        one = job(scenario, launcher, out=folder, **options).finish(timeout=120)
        failed = Path(folder) / "failed"
        one.after_failure = time.time() - float(failed.read_text()) if failed.exists() else None
    return one


def torchrun(scenario):
    return Job(*TORCHRUN, JOB, scenario, "--launcher", "none").finish(timeout=120)


def kill(scenario, launcher, folder, *, who, signum=signal.SIGKILL, after=0.4, bad=1):
    """Start a job, wait until its ranks are at work, and signal rank ``who``, the ``"parent"`` or the ``"group"``."""
    one = job(scenario, launcher, out=folder, bad=bad)
    try:
        pids = [note["pid"] for note in wait_for_notes(folder, 2)]
        time.sleep(after)
    except BaseException:
        one.kill()
        raise
    one.signalled = time.monotonic()
    if who == "group":
        os.killpg(one.process.pid, signum)
    else:
        os.kill(one.process.pid if who == "parent" else pids[who], signum)
    one.finish(timeout=120)
    one.after_signal = time.monotonic() - one.signalled
    one.notes = wait_for_notes(folder, 2)
    return one


def stop_rank_0(folder):
    """SIGSTOP to rank 0, which hosts the store, while rank 1 waits for it in a collective of 4 seconds."""
    one = job("hang_in_collective", out=folder, bad=0, JOB_TIMEOUT=4)
    try:
        rank_0, rank_1 = (note["pid"] for note in wait_for_notes(folder, 2))
        os.kill(rank_0, signal.SIGSTOP)
        stopped = time.monotonic()
        while rank_1 in one.descendants() and time.monotonic() - stopped < GONE_WITHIN:
            time.sleep(0.1)
        one.after_stop = time.monotonic() - stopped
    finally:
        one.kill()
    return one.finish(timeout=30)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Every job of this file, started in this order, by name."""

    def folder():
        return tmp_path_factory.mktemp("notes")

    term, interrupt = signal.SIGTERM, signal.SIGINT
    plan = {}
    for launcher in ("script", "fork"):
        for scenario in (
            "raise_before",
            "raise",
            "raise_while_others_sleep",
            "sys_exit",
            "killed",
            "killed_others_sleep",
        ):
            plan[scenario, launcher] = (plain, scenario, launcher)
        plan["barrier_late", launcher] = (plain, "barrier_late", launcher)
        plan["ok", launcher] = (plain, "ok", launcher)
    plan["barrier_absent", "fork"] = (plain, "barrier_absent", "fork")
    plan["raise", "spawn"] = (plain, "raise", "spawn")
    plan["killed_others_sleep", "spawn"] = (plain, "killed_others_sleep", "spawn")
    plan["raise of rank 0", "script"] = (lambda: plain("raise_while_others_sleep", "script", bad=0),)
    plan["sys_exit of rank 0", "script"] = (lambda: plain("sys_exit", "script", bad=0),)
    plan["sys_exit_0 of rank 0", "script"] = (lambda: plain("sys_exit_0", "script", bad=0),)
    for scenario in ("sys_exit_0", "os_exit_0", "sys_exit_0_unwatched", "os_exit_0_unwatched", "slow_rank_0"):
        plan[scenario, "script"] = (plain, scenario, "script")
    plan["late_failure", "script"] = (plain, "late_failure", "script")
    plan["raise_unwatched", "script"] = (plain, "raise_unwatched", "script")
    plan["killed_unwatched", "fork"] = (plain, "killed_unwatched", "fork")
    for scenario in ("ok", "raise"):
        plan[scenario, "torchrun"] = (torchrun, scenario)
    with ThreadPoolExecutor(3) as pool:
        futures = {name: pool.submit(*call) for name, call in plan.items()}
        for launcher in ("script", "fork"):
            for name, options in {
                "parent killed": {"scenario": "hang_in_collective", "who": "parent"},
                "SIGTERM to one": {"scenario": "signal", "who": 1, "signum": term},
                "SIGTERM to all": {"scenario": "signal", "who": "group", "signum": term},
                "SIGINT to all": {"scenario": "signal", "who": "group", "signum": interrupt},
            }.items():
                futures[name, launcher] = pool.submit(kill, launcher=launcher, folder=folder(), **options)
        futures["rank 0 stopped", "script"] = pool.submit(stop_rank_0, folder())
        futures["SIGTERM to the parent", "fork"] = pool.submit(
            kill, "signal", "fork", folder(), who="parent", signum=term
        )
        yield futures


def read(jobs, scenario, launcher):
    return jobs[scenario, launcher].result(timeout=170)


BOTH = pytest.mark.parametrize("launcher", ["script", "fork"])


@pytest.mark.parametrize("launcher", ["script", "fork", "torchrun"])
def test_success_is_quiet_and_exits_0(jobs, launcher):
    one = read(jobs, "ok", launcher)
    assert one.code == 0, one.err
    assert one.out.count('"total": 3.0') == (1 if launcher == "fork" else 2)
    assert not one.left
    if launcher != "torchrun":
        assert one.err == ""


@pytest.mark.parametrize(
    ("scenario", "launcher"),
    [
        (scenario, launcher)
        for launcher in ("script", "fork")
        for scenario in ("raise_before", "raise", "raise_while_others_sleep")
    ]
    + [
        ("raise", "spawn"),
        ("raise", "torchrun"),
        ("raise_unwatched", "script"),
    ],
)
def test_the_failing_ranks_traceback_comes_first_and_once(jobs, scenario, launcher):
    one = read(jobs, scenario, launcher)
    assert one.code == 1
    assert not one.left
    if launcher != "torchrun":
        assert one.after_failure < GONE_WITHIN
    lines = [line for line in one.err.splitlines() if line and "OMP_NUM_THREADS" not in line and "****" not in line]
    assert lines[0].startswith("torchhal: rank 1"), one.err
    first = one.err.index("Traceback")
    assert "ValueError: boom on 1" in one.err[first:].split("\n\n")[0], one.err
    if launcher != "torchrun":
        assert one.err.count("Traceback") == 1, one.err


@BOTH
def test_a_rank_that_exits_is_a_failure_of_the_job(jobs, launcher):
    one = read(jobs, "sys_exit", launcher)
    assert one.code == 1
    assert one.err.startswith("torchhal: rank 1 called sys.exit(3)"), one.err
    assert not one.left


@pytest.mark.parametrize(
    ("scenario", "code"),
    [("sys_exit of rank 0", 3), ("sys_exit_0 of rank 0", 0), ("sys_exit_0", 0), ("sys_exit_0_unwatched", 0)],
)
def test_an_exit_amid_a_call_is_a_failure_whatever_its_code(jobs, scenario, code):
    one = read(jobs, scenario, "script")
    rank = 0 if scenario.endswith("rank 0") else 1
    assert one.code == 1, one.err
    assert one.err.startswith(f"torchhal: rank {rank} called sys.exit({code})"), one.err
    assert not one.left
    assert one.after_failure < GONE_WITHIN


@pytest.mark.parametrize("scenario", ["os_exit_0", "os_exit_0_unwatched"])
def test_a_process_that_ends_with_0_amid_a_call_is_a_failure_at_once(jobs, scenario):
    one = read(jobs, scenario, "script")
    assert one.code == 1, one.err
    assert "rank 1 exited with code 0 in the midst of the run" in one.err, one.err
    assert not one.left
    assert one.after_failure < GONE_WITHIN


def test_a_rank_may_end_its_script_before_rank_0_is_out_of_the_call(jobs):
    one = read(jobs, "slow_rank_0", "script")
    assert (one.code, one.err) == (0, "")


@pytest.mark.parametrize(
    ("scenario", "launcher"),
    [(s, launcher) for launcher in ("script", "fork") for s in ("killed", "killed_others_sleep")]
    + [("killed_others_sleep", "spawn"), ("killed_unwatched", "fork")],
)
def test_a_killed_rank_is_named_with_its_signal(jobs, scenario, launcher):
    one = read(jobs, scenario, launcher)
    assert one.code == 1
    assert "torchhal: rank 1 was ended by signal 9 (SIGKILL)" in one.err.split("\n\n")[0], one.err
    assert not one.left
    assert one.after_failure < GONE_WITHIN


def test_rank_0s_own_failure_ends_the_sleepers(jobs):
    one = read(jobs, "raise of rank 0", "script")
    assert one.code == 1
    assert one.err.startswith("torchhal: rank 0 failed: ValueError: boom on 0"), one.err
    assert one.err.count("ValueError: boom on 0") == 2  # the headline and the traceback
    assert not one.left
    assert one.after_failure < GONE_WITHIN


def test_a_failure_after_rank_0_was_done_still_counts(jobs):
    one = read(jobs, "late_failure", "script")
    assert one.code == 1
    assert "ValueError: boom after the end" in one.err
    assert one.err.rstrip().endswith("torchhal: rank 1 failed after rank 0 was done: exit code 1.")


@BOTH
def test_a_killed_parent_takes_its_ranks_along(jobs, launcher):
    one = read(jobs, "parent killed", launcher)
    assert one.code == -signal.SIGKILL
    assert not one.left
    assert one.after_signal < GONE_WITHIN


@BOTH
@pytest.mark.parametrize(
    ("name", "code", "signum"),
    [("SIGTERM to one", 143, 15), ("SIGTERM to all", 143, 15), ("SIGINT to all", 130, 2)],
)
def test_all_ranks_stop_at_one_step_and_the_exit_code_says_why(jobs, launcher, name, code, signum):
    one = read(jobs, name, launcher)
    if launcher == "fork" and signum == signal.SIGINT:
        code = -2  # KeyboardInterrupt, of which Python dies as of the signal
    assert one.code == code, one.err
    assert not one.left
    positions = {note["position"] for note in one.notes}
    assert len(positions) == 1, one.notes
    assert {note["signum"] for note in one.notes} == {signum}


def test_a_rank_0_that_is_stopped_holds_nobody_for_ever(jobs):
    one = read(jobs, "rank 0 stopped", "script")
    assert one.after_stop < GONE_WITHIN, one.err
    assert "rank 1 lost its connection to rank 0, which hosts the store" in one.err, one.err
    assert "is stopped" in one.err


def test_a_signal_to_the_supervisor_is_passed_on(jobs):
    one = read(jobs, "SIGTERM to the parent", "fork")
    assert one.code == 143, one.err
    assert len({note["position"] for note in one.notes}) == 1
    assert not one.left


def test_barriers_of_different_names(jobs):
    one = read(jobs, "barrier_absent", "fork")
    assert one.code == 1
    assert "is in barrier 'other' instead" in one.err or "is in barrier 'first' instead" in one.err, one.err
    assert not one.left


@BOTH
def test_a_rank_that_never_comes_to_a_barrier(jobs, launcher):
    one = read(jobs, "barrier_late", launcher)
    assert one.code == 1
    assert "CollectiveTimeoutError: barrier 'meeting': rank 1 did not come within 2." in one.err
    assert one.err.startswith("torchhal: rank 0 failed: CollectiveTimeoutError: barrier 'meeting'"), one.err
    assert not one.left
    assert one.after_failure < GONE_WITHIN


def test_success_never_turns_into_failure():
    """The exit race: a rank must not abort after its work. Several at a time make the machine busy."""
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda call: plain(*call), [("ok", "script")] * 3 + [("20 times", "fork")] * 2))
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 5
