"""Launchers without their failures: commands, payloads, results, what reaches the workers."""

import atexit
import importlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchhal.cluster import LocalEnvironment
from torchhal.distributed._dataloader_signals import WorkerInit, compose_worker_init, signals_blocked
from torchhal.distributed.process import LAUNCH_ID, exit_status, threads_per_process, without_external
from torchhal.errors import ConfigurationError, LaunchError, RankFailedError
from torchhal.launchers import ExternalLauncher, MultiprocessingLauncher, SubprocessScriptLauncher, multiprocess
from torchhal.launchers._command import interpreter_flags, script_command
from torchhal.launchers.subprocess_script import shared_threads

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from running import Job, job

FAST = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"


def launcher(n=2, method=FAST):
    environment = LocalEnvironment()
    environment.configure(1, n)
    return MultiprocessingLauncher(environment, n, start_method=method)


@pytest.fixture
def temporary_files(tmp_path, monkeypatch):
    """What is in a folder of temporary files that only this test uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # torch keeps a cache there, made when it imports its compiler
    return lambda: [name for name in os.listdir(tmp_path) if not name.startswith("torchinductor")]


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


# -- what runs in the workers (top level: spawn imports this file) ---------------------------------------------


def give_back(value):
    return value


def describe(parameter):
    # this file's state in a worker, and then a change that must not reach the parent
    with torch.no_grad():
        parameter.add_(1.0)
    return {
        "python": random.random(),
        "torch": torch.rand(3),
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "matmul": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "shared": parameter.is_shared(),
        "sum": parameter.sum().item(),
        "ranks": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
    }


OTHERS_SLEEP = 600


def fail(kind):
    if os.environ["RANK"] == "1":
        raise kind(f"boom on {os.environ['RANK']}")
    time.sleep(OTHERS_SLEEP)


def give_back_a_lock():
    return threading.Lock()


def exit_with(code):
    sys.exit(code)


def compute():
    """Everything that starts a parallel region: matmul, sort, convolution, an optimizer's step."""
    torch.sort(torch.randn(500, 500))
    (torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.randn(300_000))])
    model(torch.randn(16, 3, 32, 32)).sum().backward()
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    return torch.get_num_threads()


class Odd(Exception):
    """Does not come back from pickle."""

    def __init__(self, one, two):
        super().__init__(one)


def fail_oddly():
    raise Odd(1, 2)


# -- the command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("original", "flags", "code"),
    [
        (["python", "train.py", "-O"], [], None),
        (["python", "-u", "-X", "dev", "-W", "error", "train.py"], ["-u", "-Xdev", "-Werror"], None),
        (["python", "-uO", "-m", "pkg.mod", "-c", "x"], ["-uO"], None),
        (["python", "-um", "pkg.mod"], ["-u"], None),
        (["python", "-Ic", "print(1)", "a"], ["-I"], "print(1)"),
        (["python", "-cprint(2)"], [], "print(2)"),
        (["python", "-i", "train.py"], [], None),
        (["python", "-ui", "train.py"], ["-u"], None),
        (["python", "-Wdefault", "--check-hash-based-pycs", "always", "t.py"],
         ["-Wdefault", "--check-hash-based-pycs", "always"], None),
        (["python", "-XdevW"], ["-XdevW"], None),
        (["python"], [], None),
    ],
)  # fmt: skip
def test_interpreter_flags(original, flags, code):
    assert interpreter_flags(original) == (flags, code)


def test_a_test_session_is_not_run_again():
    with pytest.raises(LaunchError, match=r"inside a test session .*'ddp_spawn' or 'ddp_fork'"):
        script_command()


def test_script_on_stdin_refused():
    """A script on stdin is no file to run again."""
    code = "from torchhal.launchers._command import script_command\nscript_command()\n"
    for command in ([sys.executable, "-"], [sys.executable]):
        ended = Job(*command, stdin=code).finish()
        assert ended.code == 1
        assert "LaunchError: there is no script to run again (is it read from stdin?)" in ended.err


PRINT = """
import sys, os
from torchhal.cluster import LocalEnvironment
from torchhal.launchers import SubprocessScriptLauncher
environment = LocalEnvironment()
environment.configure(1, 2)
class Local: pass
def work():
    import pickle
    assert type(pickle.loads(pickle.dumps(Local()))) is Local  # __main__ is the script
    return environment.global_rank()
rank = SubprocessScriptLauncher(environment, 2).launch(work)
sys.stdout.write(repr((rank, sys.argv, sys.flags.optimize, __name__, sys.path[0])) + "\\n")
"""


@pytest.mark.slow
def test_script_module_and_code_run_again_alike(tmp_path):
    """One command line per form, all at once: the output of rank 1 differs from rank 0's in the rank only."""
    (tmp_path / "script.py").write_text(PRINT)
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mod.py").write_text(PRINT)
    (package / "__main__.py").write_text(PRINT)
    forms = {
        "script": ["-O", "script.py", "--lr", "0.1 x", "script.py"],
        "module": ["-O", "-m", "pkg.mod", "a"],
        "folder": ["-O", "pkg", "b"],
        "code": ["-O", "-c", PRINT, "c", "d"],
    }
    jobs = {form: Job(sys.executable, *arguments, cwd=tmp_path) for form, arguments in forms.items()}
    for form, one in jobs.items():
        one.finish()
        assert one.code == 0, (form, one.err)
        first, second = sorted(eval(line) for line in one.out.splitlines())
        assert (first[0], second[0]) == (0, 1), form
        assert second[2:] == first[2:] == (1, "__main__", first[4]), form
        assert second[1][1:] == first[1][1:] == sys_argv(forms[form]), form
        assert not one.left


def sys_argv(arguments):
    after = {"script.py": 2, "-m": 3, "pkg": 2, "-c": 3}  # words before the script's own arguments
    return arguments[after[arguments[1]] :]


def test_no_script_to_run_again(tmp_path):
    one = Job(sys.executable, "-c", f"import sys; sys.ps1 = '>>> '; exec({PRINT!r})").finish()
    assert one.code == 1
    assert "notebook or an interactive interpreter: use strategy='ddp_spawn'" in one.err


# -- the job ---------------------------------------------------------------------------------------------------


def test_concurrent_and_repeated_launches():
    """Two jobs at once launch twice each, and a launch with another number is refused."""
    jobs = [job("twice"), job("twice"), job("other_number")]
    for one in jobs[:2]:
        one.finish()
        assert one.code == 0, one.err
        assert one.out.count('"total": 3.0') == 2
        assert not one.left
        assert one.err == ""
    refused = jobs[2].finish()
    assert refused.code == 1
    assert "runs as 2 process(es) on 1 node(s) since its first launch, and can't go on as 3 on 1" in refused.err
    assert not refused.left


def test_external_launcher_just_calls():
    assert ExternalLauncher().launch(give_back, value=3) == 3


@pytest.mark.cold_start
def test_importing_launchers_is_light():
    code = (
        "import sys, torchhal.launchers._subprocess_entry, torchhal.launchers.worker\n"
        "assert 'torch' not in sys.modules\n"
        "import torchhal.distributed._rank_monitor\n"
        "import torchhal.launchers.subprocess_script, torchhal.launchers.multiprocess\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    one = Job(sys.executable, "-c", code).finish()
    assert one.code == 0, one.err


# -- workers ---------------------------------------------------------------------------------------------------


def test_state_reaches_spawned_workers_and_only_copies_return(monkeypatch, temporary_files):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    parameter = torch.nn.Parameter(torch.zeros(4))
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    python, rng = random.getstate(), torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("high")
        torch.set_num_threads(1)
        got = launcher(2, "spawn").launch(describe, parameter)
        assert got["python"] == random.random()
        assert torch.equal(got["torch"], torch.rand(3))
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(threads)
        random.setstate(python)
        torch.set_rng_state(rng)
    assert got["dtype"] == torch.float64
    assert got["deterministic"] == (True, True)
    assert got["matmul"] == "high"
    assert got["threads"] == 1
    assert got["omp"] == str(threads_per_process(2))
    assert got["ranks"] == ["0", "0", "0", "2", "2"]
    assert not got["shared"]
    assert got["sum"] == 4.0
    assert parameter.sum().item() == 0.0
    assert temporary_files() == []
    assert LAUNCH_ID not in os.environ
    assert not [child for child in multiprocessing.active_children() if not child.daemon]  # the tests' world is one


def test_results_come_back_from_forks():
    value = {"tensor": torch.arange(5), "nested": [1, ("x", None)]}
    got = launcher(3).launch(give_back, value)
    assert torch.equal(got["tensor"], value["tensor"])
    assert got["nested"] == value["nested"]
    descriptors = open_descriptors()
    launcher(2).launch(give_back, 1)
    assert open_descriptors() == descriptors


class Connection:
    """What its owner closes when the program ends, or when nothing keeps it any more."""

    def __init__(self, note):
        self.note, self.pid = note, os.getpid()

    def close(self):
        if os.getpid() != self.pid:
            self.note.write_text("closed by a fork")

    __del__ = close


def registers_a_handler(note):
    atexit.register(note.write_text, "the worker's own")
    return os.getpid()


def test_a_fork_leaves_its_parents_exit_handlers_alone(tmp_path):
    """It neither calls them nor frees what they alone keep, whose threads it has not; its own ones run."""
    parents, own = tmp_path / "parents", tmp_path / "own"
    atexit.register(Connection(parents).close)
    assert launcher(2, "fork").launch(registers_a_handler, own) != os.getpid()
    assert not parents.exists()
    assert own.read_text() == "the worker's own"


def forks_compute():
    torch.set_num_threads(2)
    compute()
    importlib.import_module("torch._dynamo")  # a first optimizer step does
    assert launcher(2).launch(compute) >= 1
    compute()


@pytest.mark.skipif(FAST != "fork", reason="environment: no fork here")
def test_forks_compute_after_their_parent_has():
    """OpenMP threads do not survive a fork, and a runtime that believes they did waits for them for ever.

    In a process of its own: in one that has computed gradients on an accelerator, torch refuses to fork for more.
    """
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_launchers as t; t.forks_compute()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_sent_is_named(temporary_files):
    class Local(torch.nn.Module):
        pass

    with pytest.raises(LaunchError, match=r"argument 0 .of type .*Local.*can't be sent .*Local.*'ddp_fork'"):
        launcher(2, "spawn").launch(give_back, Local())
    with pytest.raises(LaunchError, match=r"argument 'value'\['inner'\] \(of type lock\) can't be sent"):
        launcher(2, "spawn").launch(give_back, value={"inner": threading.Lock()})
    with pytest.raises(LaunchError, match=r"the function .*can't be sent"):
        launcher(2, "spawn").launch(lambda: None)
    with pytest.raises(LaunchError, match=r"the function has run, but its result can't be sent back .*lock"):
        launcher(2).launch(give_back_a_lock)
    assert temporary_files() == []
    assert not [child for child in multiprocessing.active_children() if not child.daemon]  # the tests' world is one


def test_worker_error_ends_launch(temporary_files):
    """A worker's error is raised with its traceback, and all workers have ended."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    start = time.monotonic()
    with pytest.raises(RankFailedError) as info:
        launcher(2).launch(fail, ValueError)
    error = info.value
    assert error.rank == 1
    assert str(error).startswith("rank 1 failed: ValueError: boom on 1\n\nTraceback")
    assert "raise kind(" in error.traceback
    assert isinstance(error.__cause__, ValueError)
    assert time.monotonic() - start < OTHERS_SLEEP / 2
    assert not [child for child in multiprocessing.active_children() if not child.daemon]  # the tests' world is one
    assert temporary_files() == []
    assert {signum: signal.getsignal(signum) for signum in before} == before


def test_unpicklable_error_as_text():
    """An error that does not pickle arrives as text."""
    with pytest.raises(RankFailedError, match=r"failed: .*Odd: 1") as info:
        launcher(2).launch(fail_oddly)
    assert info.value.__cause__ is None


@pytest.mark.parametrize(("code", "status"), [(3, 3), ("bye", 1), (143, 143)])
def test_all_ranks_exit_alike(code, status):
    with pytest.raises(SystemExit) as info:
        launcher(2).launch(exit_with, code)
    assert info.value.code == status


def test_exit_without_an_error_is_no_result():
    with pytest.raises((RankFailedError, SystemExit)):
        launcher(2).launch(exit_with, 0)


def test_start_methods_are_checked():
    with pytest.raises(ConfigurationError, match="'start_method' must be one of 'spawn', 'fork', 'forkserver'"):
        MultiprocessingLauncher(LocalEnvironment(), 2, start_method="thread")
    assert launcher(2, "spawn").name == "spawn"
    assert SubprocessScriptLauncher(LocalEnvironment(), 2).name == "subprocess_script"


def test_a_main_script_without_a_guard(tmp_path):
    (tmp_path / "script.py").write_text(
        PRINT.replace("SubprocessScriptLauncher", "MultiprocessingLauncher").replace("launch(work)", "launch(print)")
    )
    one = Job(sys.executable, "script.py", cwd=tmp_path).finish()
    assert one.code == 1
    assert "under 'if __name__ == \"__main__\":'" in one.err
    assert not one.left


# -- small parts -----------------------------------------------------------------------------------------------


def test_threads_are_shared_and_restored(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    assert threads_per_process(2) == max(1, cores // 2)
    assert threads_per_process(10_000) == 1
    with shared_threads(10_000):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_process(2) is None


def test_an_outer_torchruns_variables_are_dropped():
    environ = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "ROLE_NAME": "d", "HOME": "/root", "PATH": "p"}
    without_external(environ)
    assert environ == {"HOME": "/root", "PATH": "p"}


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (3, 3), (256 + 7, 7), ("text", 1), (True, 1)])
def test_exit_status(code, status):
    assert exit_status(code) == status


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.02)
        return index


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_live_through_a_signal_to_everybody(method):
    """SIGTERM and SIGINT from outside pass them by; the loader itself ends them."""
    seen = []
    init = compose_worker_init(None)
    assert compose_worker_init(init) is init
    assert isinstance(init, WorkerInit)
    loader = torch.utils.data.DataLoader(
        Items(), batch_size=4, num_workers=2, worker_init_fn=init, multiprocessing_context=method
    )
    with signals_blocked(loader):
        iterator = iter(loader)
    seen.append(next(iterator))
    pids = [worker.pid for worker in iterator._workers]
    killer = f"import os; [os.kill(pid, signum) for pid in {pids} for signum in (15, 2, 15)]"
    os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-S", "-c", killer])
    seen += list(iterator)
    assert torch.equal(torch.cat(seen), torch.arange(64))
    if method == "spawn":
        return
    with signals_blocked(loader):
        iterator = iter(loader)
    next(iterator)
    workers = list(iterator._workers)
    for worker in workers:
        worker.terminate()  # what multiprocessing does at exit
        worker.join(5)
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_pending_signal_of_worker_is_delayed(monkeypatch):
    """However often the supervisor looks: one to all of them is on its way to this process, too."""
    now = 100.0
    monkeypatch.setattr(multiprocess, "is_pending", lambda pid, signum: True)
    monkeypatch.setattr(multiprocess, "time", SimpleNamespace(monotonic=lambda: now))
    signals = multiprocess.SignalRecorder()
    crew = multiprocess._WorkerGroup(launcher(), None, None, (give_back, (), {}), signals)
    crew._workers = [multiprocess._Worker(0, multiprocessing.current_process(), None)]
    for _ in range(100):
        crew._take_pending()
    assert signals.received == []
    now += 1.0
    crew._take_pending()
    assert signals.received == [signal.SIGTERM]
