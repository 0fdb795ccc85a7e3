"""What happens when a rank fails, dies, hangs or is asked to stop: real processes, both kinds of launcher."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from limits import scaled
from running import JOB, Job, job, wait_for_notes

GONE_WITHIN = scaled(60)
"""Seconds from a rank's failure until every process is gone: a few, unless the machine has much else to do."""
IN_VAIN = 600
"""Seconds that a rank sleeps, or waits in a collective, whom nobody ends."""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def plain(scenario, launcher, folder, **options):
    """Run a job to its end; ``after_failure`` is how long everything took to be gone."""
    one = job(scenario, launcher, out=folder, **options).finish(timeout=120)
    failed = folder / "failed"
    one.after_failure = time.time() - float(failed.read_text()) if failed.exists() else None
    return one


def torchrun(scenario):
    return Job(*TORCHRUN, JOB, scenario, "--launcher", "none").finish(timeout=120)


def kill(scenario, launcher, folder, *, who, signum=signal.SIGKILL, after=0.4, bad=1):
    """Start a job, wait until its ranks are at work, and signal rank ``who``, the ``"parent"`` or the ``"group"``."""
    one = job(scenario, launcher, out=folder, bad=bad, JOB_TIMEOUT=IN_VAIN)
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


OTHERS = {
    "raise of rank 0": partial(plain, "raise_while_others_sleep", bad=0),
    "sys_exit of rank 0": partial(plain, "sys_exit", bad=0),
    "sys_exit_0 of rank 0": partial(plain, "sys_exit_0", bad=0),
    "parent killed": partial(kill, "hang_in_collective", who="parent"),
    "SIGTERM to one": partial(kill, "signal", who=1, signum=signal.SIGTERM),
    "SIGTERM to all": partial(kill, "signal", who="group", signum=signal.SIGTERM),
    "SIGINT to all": partial(kill, "signal", who="group", signum=signal.SIGINT),
    "SIGTERM to the parent": partial(kill, "signal", who="parent", signum=signal.SIGTERM),
    "SIGTERM to the parent of one that leaves late": partial(kill, "leaves_late", who="parent", signum=signal.SIGTERM),
    "SIGINT to the parent": partial(kill, "signal", who="parent", signum=signal.SIGINT),
}
"""Jobs that are more than a scenario of job.py."""


@pytest.fixture
def run(tmp_path):
    """Run a job to its end: its name and its launcher."""

    def to_its_end(name, launcher):
        if launcher == "torchrun":
            return torchrun(name)
        return OTHERS.get(name, partial(plain, name))(launcher=launcher, folder=tmp_path)

    return to_its_end


BOTH = pytest.mark.parametrize("launcher", ["script", "fork"])


@pytest.mark.parametrize("launcher", ["script", "fork", "torchrun"])
def test_success_is_quiet_and_exits_0(run, launcher):
    one = run("ok", launcher)
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
def test_the_failing_ranks_traceback_comes_first_and_once(run, scenario, launcher):
    one = run(scenario, launcher)
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
def test_exiting_rank_fails_job(run, launcher):
    """A rank that exits is a failure of the job."""
    one = run("sys_exit", launcher)
    assert one.code == 1
    assert one.err.startswith("torchhal: rank 1 called sys.exit(3)"), one.err
    assert not one.left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "code"),
    [("sys_exit of rank 0", 3), ("sys_exit_0 of rank 0", 0), ("sys_exit_0", 0), ("sys_exit_0_unwatched", 0)],
)
def test_exit_during_call_fails(run, scenario, code):
    """An exit amid a call is a failure, whatever its code."""
    one = run(scenario, "script")
    rank = 0 if scenario.endswith("rank 0") else 1
    assert one.code == 1, one.err
    assert one.err.startswith(f"torchhal: rank {rank} called sys.exit({code})"), one.err
    assert not one.left
    assert one.after_failure < GONE_WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["os_exit_0", "os_exit_0_unwatched"])
def test_exit_0_during_call_fails(run, scenario):
    """A process that ends with 0 amid a call is a failure at once."""
    one = run(scenario, "script")
    assert one.code == 1, one.err
    assert "rank 1 exited with code 0 in the midst of the run" in one.err, one.err
    assert not one.left
    assert one.after_failure < GONE_WITHIN


def test_rank_may_end_before_rank_0(run):
    """A rank may end its script before rank 0 has returned from the call."""
    one = run("slow_rank_0", "script")
    assert (one.code, one.err) == (0, "")


@pytest.mark.parametrize(
    ("scenario", "launcher"),
    [(s, launcher) for launcher in ("script", "fork") for s in ("killed", "killed_others_sleep")]
    + [("killed_others_sleep", "spawn"), ("killed_unwatched", "fork")],
)
def test_a_killed_rank_is_named_with_its_signal(run, scenario, launcher):
    one = run(scenario, launcher)
    assert one.code == 1
    assert "torchhal: rank 1 was ended by signal 9 (SIGKILL)" in one.err.split("\n\n")[0], one.err
    assert not one.left
    assert one.after_failure < GONE_WITHIN


@pytest.mark.slow
def test_rank_0s_own_failure_ends_the_sleepers(run):
    one = run("raise of rank 0", "script")
    assert one.code == 1
    assert one.err.startswith("torchhal: rank 0 failed: ValueError: boom on 0"), one.err
    assert one.err.count("ValueError: boom on 0") == 2  # the headline and the traceback
    assert not one.left
    assert one.after_failure < GONE_WITHIN


def test_failure_after_rank_0_ended(run):
    """A failure after rank 0 was done still counts."""
    one = run("late_failure", "script")
    assert one.code == 1
    assert "ValueError: boom after the end" in one.err
    assert one.err.rstrip().endswith("torchhal: rank 1 failed after rank 0 was done: exit code 1.")


@BOTH
def test_a_killed_parent_takes_its_ranks_along(run, launcher):
    one = run("parent killed", launcher)
    assert one.code == -signal.SIGKILL
    assert not one.left
    assert one.after_signal < GONE_WITHIN
    if launcher == "script":  # the parent is rank 0, and nobody is left to say so
        named = re.findall(rf"^torchhal: rank 0 \(process {one.process.pid}\) .*SIGKILL.*$", one.err, re.MULTILINE)
        assert len(named) == 1, one.err


ENDS = """
import os, signal, sys
from torchhal.launchers._exit_monitor import ExitMonitor

monitor = ExitMonitor(6)
fork = os.fork() if sys.argv[1] == "a fork lives" else 1
if fork == 0:
    os.close(1), os.close(2)
    signal.pause()
print(fork, flush=True)
if sys.argv[1] == "stop":
    monitor.stop()
if sys.argv[1] == "exec":
    os.execv("/bin/true", ["true"])
if sys.argv[1] == "exit":
    os._exit(3)
os.kill(os.getpid(), signal.SIGABRT if sys.argv[1] == "abort" else signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "SIGKILL"), ("a fork lives", "SIGKILL"), ("abort", "SIGABRT|another signal"),
        ("exit", r"os._exit\(3\)|another signal"), ("stop", ""),
    ],
)  # fmt: skip
def test_the_launching_rank_s_death_is_said(how, said):
    """By whom it can't take along: with the status, where it could still be read."""
    one = Job(sys.executable, "-c", ENDS, how)
    for line in one.process.stdout:
        fork = int(line)
        break
    try:
        one.process.wait(timeout=60)
        err = one.process.stderr.read()
    finally:
        if fork > 1:
            os.kill(fork, signal.SIGKILL)
        one.kill()
    if said:
        assert re.fullmatch(rf"torchhal: rank 6 \(process {one.process.pid}\) .*({said}).*ended with it\.\n", err), err
    else:
        assert err == ""


@BOTH
@pytest.mark.parametrize(
    ("name", "code", "signum"),
    [("SIGTERM to one", 143, 15), ("SIGTERM to all", 143, 15), ("SIGINT to all", 130, 2)],
)
def test_ranks_stop_at_one_step(run, launcher, name, code, signum):
    """All ranks stop at one step, and the exit code is that of the signal."""
    one = run(name, launcher)
    if launcher == "fork" and signum == signal.SIGINT:
        code = -2  # KeyboardInterrupt, of which Python dies as of the signal
    assert one.code == code, one.err
    assert not one.left
    positions = {note["position"] for note in one.notes}
    assert len(positions) == 1, one.notes
    assert {note["signum"] for note in one.notes} == {signum}


def test_stopped_rank_0_is_detected(tmp_path):
    """A rank 0 that is stopped does not hold the others for ever."""
    one = stop_rank_0(tmp_path)
    assert one.after_stop < GONE_WITHIN, one.err
    assert "rank 1 lost its connection to rank 0, which hosts the store" in one.err, one.err
    assert "is stopped" in one.err


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", -2)])  # -2: see above
def test_a_signal_to_the_supervisor_is_passed_on(run, name, code):
    one = run(f"{name} to the parent", "fork")
    assert one.code == code, one.err
    assert len({note["position"] for note in one.notes}) == 1
    assert {note["signum"] for note in one.notes} == {signal.Signals[name]}
    assert not one.left


@pytest.mark.parametrize("launcher", ["fork", "script"])
def test_signal_is_counted_once(run, launcher):
    """A rank that dies of the signal is no second signal for the others."""
    one = run("SIGTERM to the parent of one that leaves late", launcher)
    assert one.code == 143, one.err
    assert one.notes[0]["received"] == [signal.SIGTERM]
    assert not one.left


def test_barriers_of_different_names(run):
    one = run("barrier_absent", "fork")
    assert one.code == 1
    assert "is in barrier 'other' instead" in one.err or "is in barrier 'first' instead" in one.err, one.err
    assert not one.left


@pytest.mark.slow
@BOTH
def test_a_rank_that_never_comes_to_a_barrier(run, launcher):
    one = run("barrier_late", launcher)
    assert one.code == 1
    assert "CollectiveTimeoutError: barrier 'meeting': rank 1 did not come within 2." in one.err
    assert one.err.startswith("torchhal: rank 0 failed: CollectiveTimeoutError: barrier 'meeting'"), one.err
    assert not one.left
    assert one.after_failure < GONE_WITHIN


@pytest.mark.slow
def test_success_never_turns_into_failure(tmp_path):
    """The exit race: a rank must not abort after its work. Several at a time make the machine busy."""
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda call: plain(*call, tmp_path), [("ok", "script")] * 3 + [("20 times", "fork")] * 2))
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 5


INTERRUPTED = """
import time

import torch

from torchhal import Module, Trainer
from torchhal.launchers import subprocess_script


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def interrupted(rank):
    time.sleep(4)  # the other rank waits in the store meanwhile
    raise KeyboardInterrupt


subprocess_script.ExitMonitor = interrupted
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1, logger=False, enable_checkpointing=False)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(4, 1)))
"""


def test_interrupt_between_starts_ends_children_silently(tmp_path):
    """A Ctrl-C while the launcher starts its processes: those that run report no loss of the store."""
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode in (130, -signal.SIGINT), done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert "DistNetworkError" not in done.stderr
    assert "failed" not in done.stderr, done.stderr
