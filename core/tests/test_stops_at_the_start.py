"""A signal before training has begun: every process is gone soon, with the signal's code."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal.distributed import _stop_agreement as stop_agreement
from torchhal.distributed import failures, signals
from torchhal.distributed.failures import Failure, exit_for_signal
from torchhal.distributed.signals import StopRequested, StopSignals
from torchhal.errors import RankFailedError
from torchhal.launchers._subprocess_supervisor import ChildProcesses
from torchhal.trainer import _run_lifecycle

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from limits import scaled
from running import HERE, Job, wait_for_notes
from tiers import slow

GONE_WITHIN = scaled(15)
CODES = {signal.SIGINT: (130, -signal.SIGINT), signal.SIGTERM: (143, -signal.SIGTERM)}
"""128 and the number, or the signal itself, which a shell shows as that: Python dies so of KeyboardInterrupt."""

STRATEGIES = ["ddp", "ddp_spawn", "ddp_fork", "ddp_forkserver", "ddp_notebook", "torchrun"]
MOMENTS = int(os.environ.get("TESTS_MOMENTS", "8"))
"""Of each launcher, others in each session: 20 are a minute and a half of waiting."""
SIGNALS = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture
def start(tmp_path):
    """Start scripts/starting.py by a strategy, or by torchrun."""
    jobs = []

    def start(strategy, **config):
        config = {"out": str(tmp_path), "strategy": "ddp" if strategy == "torchrun" else strategy, **config}
        command = [sys.executable]
        if strategy == "torchrun":
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        jobs.append(Job(*command, HERE / "starting.py", json.dumps(config), PYTHONWARNINGS="ignore"))
        jobs[-1].strategy = strategy
        return jobs[-1]

    yield start
    for one in jobs:
        one.kill()


def stop(job, signum, who="group"):
    """Send the signal, wait for the end of all; the job."""
    signalled = time.monotonic()
    if who == "group":
        os.killpg(job.process.pid, signum)
    else:
        os.kill(who, signum)
    try:
        job.finish(timeout=90)
    except AssertionError as error:
        raise AssertionError(f"{signum!r}: {error}") from None
    job.took = time.monotonic() - signalled
    return job


def assert_stopped(job, signum):
    if job.strategy == "torchrun":  # the agent's code is its own, and it looks after its workers now and then
        # and Python loses a Ctrl-C that it raises in a callback of an import: the agent kills such a worker after 30 s
        assert job.code != 0, job.err
        assert job.took < 3 * GONE_WITHIN, job.err
    else:
        assert job.code in CODES[signum], (job.code, job.err)
        assert job.took < GONE_WITHIN, job.err
        ended_of = job.err.rpartition("During handling of the above exception")[2]  # which may be a library's own
        assert not re.search(r"^([\w.]+Error\b|torchhal: rank \d+ failed)", ended_of, re.MULTILINE), job.err
    assert not job.left


def wait_until(there):
    deadline = time.monotonic() + scaled(90)
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- one process ---------------------------------------------------------------------------------------------


class Signalled(torchhal.Module):
    """Sends this process a signal in one hook, and notes the hooks that are called."""

    def __init__(self, at, signum):
        super().__init__()
        self.at, self.signum, self.called = at, signum, []
        self.layer = torch.nn.Linear(4, 1)

    def note(self, name):
        self.called.append(name)
        if name == self.at:
            signal.raise_signal(self.signum)
            self.called.append("went on")

    def prepare_data(self):
        self.note("prepare_data")

    def setup(self, stage):
        self.note("setup")

    def configure_model(self):
        self.note("configure_model")

    def configure_optimizers(self):
        self.note("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        self.note("train_dataloader")
        return loader()

    def val_dataloader(self):
        self.note("val_dataloader")
        return loader()

    def on_fit_start(self):
        self.note("on_fit_start")

    def on_train_start(self):
        self.note("on_train_start")

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.note("validation_step")

    def teardown(self, stage):
        self.called.append("teardown")


def loader():
    return DataLoader(TensorDataset(torch.ones(8, 4)), 2)


BEFORE = [
    "prepare_data", "setup", "configure_model", "configure_optimizers", "train_dataloader", "val_dataloader",
    "on_fit_start", "on_train_start",
]  # fmt: skip


@pytest.mark.parametrize("name", BEFORE)
@SIGNALS
def test_signal_in_hook_before_training(name, signum, tmp_path, capfd):
    """A signal in a hook before training ends the run there."""
    model = Signalled(name, signum)
    trainer = torchhal.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(KeyboardInterrupt if signum == signal.SIGINT else SystemExit) as caught:
        trainer.fit(model)
    assert signum == signal.SIGINT or caught.value.code == 143
    assert "went on" not in model.called and "training_step" not in model.called
    assert model.called[-1] == "teardown"
    assert f"torchhal: fit stopped on {signal.Signals(signum).name} before it began\n" in capfd.readouterr().err
    assert not list(tmp_path.rglob("*.ckpt"))  # there is nothing to save
    assert {one: signal.getsignal(one) for one in handlers} == handlers


@SIGNALS
def test_signal_before_ranks_meet(signum, tmp_path, capfd, monkeypatch):
    """A signal just before the set-up ends the run before it: another rank that it has ended never comes to that."""
    trainer = torchhal.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False)
    met = []
    monkeypatch.setattr(trainer.strategy, "setup_environment", lambda: met.append(True))
    set_torch_flags = _run_lifecycle.set_torch_flags

    def signalled(run):
        signal.raise_signal(signum)
        set_torch_flags(run)

    monkeypatch.setattr(_run_lifecycle, "set_torch_flags", signalled)
    with pytest.raises(KeyboardInterrupt if signum == signal.SIGINT else SystemExit):
        trainer.fit(Signalled("", 0))
    assert not met
    assert f"torchhal: fit stopped on {signal.Signals(signum).name} before it began\n" in capfd.readouterr().err


def test_signal_in_sanity_check(tmp_path, capfd):
    """A signal in the sanity check ends the run after that batch."""
    model = Signalled("validation_step", signal.SIGTERM)
    trainer = torchhal.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False)
    with pytest.raises(SystemExit) as caught:
        trainer.fit(model)
    assert caught.value.code == 143
    assert model.called.count("validation_step") == 1 and "training_step" not in model.called
    assert "torchhal: fit stopped on SIGTERM at step 0\n" in capfd.readouterr().err
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    "hook", ["on_sanity_check_start", "on_validation_start", "on_validation_epoch_start", "on_sanity_check_end"]
)
@SIGNALS
def test_signal_in_sanity_check_hook(hook, signum, tmp_path, capfd):
    """A signal in a hook around the sanity check ends the run after that hook."""

    class At(torchhal.Callback):
        pass

    setattr(At, hook, lambda self, trainer, module: signal.raise_signal(signum))
    model = Signalled("", 0)
    trainer = torchhal.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False, callbacks=At()
    )
    with pytest.raises(KeyboardInterrupt if signum == signal.SIGINT else SystemExit) as caught:
        trainer.fit(model)
    assert signum == signal.SIGINT or caught.value.code == 143
    assert model.called.count("validation_step") == (2 if hook == "on_sanity_check_end" else 0)
    assert "training_step" not in model.called
    assert f"torchhal: fit stopped on {signal.Signals(signum).name} at step 0\n" in capfd.readouterr().err
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_a_signal_before_an_evaluation_ends_it(fn):
    class Model(Signalled):
        test_step = predict_step = Signalled.validation_step

    model = Model("setup", signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        getattr(torchhal.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False), fn)(model, loader())
    assert caught.value.code == 143
    assert "validation_step" not in model.called


@pytest.mark.parametrize(
    ("fn", "hook", "says"),
    [
        ("fit", "setup", "before it began"),
        ("fit", "validation_step", "before it began"),  # of the sanity check
        ("fit", "training_step", "at step 0, as rank 1 left at once"),
        ("validate", "setup", "before it began"),
        ("validate", "validation_step", "at step 0, as rank 1 left at once"),
    ],
)
def test_stop_line_when_other_rank_left(fn, hook, says, tmp_path, capfd):
    """The line of a stop tells where the run was when another rank left it."""

    class Model(Signalled):
        def note(self, name):
            if name == hook:
                raise RankFailedError("rank 1 was interrupted", rank=1, stop_signal=signal.SIGINT)

    trainer = torchhal.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False)
    with pytest.raises(KeyboardInterrupt):
        getattr(trainer, fn)(Model("", 0))
    assert f"torchhal: {fn} stopped on SIGINT {says}\n" in capfd.readouterr().err


def test_scheduler_signal_waits_for_step(tmp_path):
    """What requeues a job wants a checkpoint to go on from."""
    asked = []
    with StopSignals(asked.append, signals=(*signals.DEFAULT_SIGNALS, signal.SIGUSR1)) as stop, stop.at_once():
        signal.raise_signal(signal.SIGUSR1)
        assert asked == [signal.SIGUSR1]


def test_the_second_interrupt_interrupts_the_clean_up_too():
    with pytest.raises(KeyboardInterrupt), StopSignals(lambda signum: None) as stop, stop.at_once():
        try:
            signal.raise_signal(signal.SIGINT)
        except StopRequested:
            signal.raise_signal(signal.SIGTERM)  # of the launcher, which passes it on: it disturbs no clean-up
            signal.raise_signal(signal.SIGINT)


def test_caught_interrupts_leave_one_excepthook(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    counted = []
    monkeypatch.setattr(failures, "uncaught", [counted.append])
    for _ in range(3):
        failures.install_excepthook()  # as a fit does
        interrupt = exit_for_signal(signal.SIGINT, agreed=True)
    sys.excepthook(KeyboardInterrupt, interrupt, None)
    assert capsys.readouterr().err == "" and counted == []
    sys.excepthook(ValueError, error := ValueError("boom"), None)
    assert capsys.readouterr().err == "ValueError: boom\n" and counted == [error]
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "KeyboardInterrupt\n"


def test_an_error_after_caught_interrupts_is_printed_once():
    """In a program, with its status."""
    code = """if True:
        import signal, sys
        from torchhal.distributed import failures, signals
        for _ in range(2):
            failures.install_excepthook()
            try:
                raise failures.exit_for_signal(signal.SIGINT, agreed=True)
            except KeyboardInterrupt:
                pass
        raise ValueError("boom")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: boom") == done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.parametrize(
    ("error", "signum"),
    [
        (exit_for_signal(signal.SIGTERM, agreed=False), signal.SIGTERM),
        (exit_for_signal(signal.SIGINT, agreed=False), signal.SIGINT),
        (KeyboardInterrupt(), signal.SIGINT),
        (exit_for_signal(signal.SIGTERM, agreed=True), 0),
        (exit_for_signal(signal.SIGINT, agreed=True), 0),
        (SystemExit(143), 0),
        (ValueError("x"), 0),
    ],
)
def test_report_keeps_stop_signal(error, signum):
    """A report tells a stop of one rank from that of all."""
    failure = Failure.from_json(Failure.from_exception(1, error).to_json())
    assert failure.stop_signal == signum
    assert failure.error().stop_signal == signum


@pytest.fixture
def children():
    """Those of a launcher, one that runs ``code``."""
    made = []

    def start(code):
        reading, writing = os.pipe()
        child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        os.close(writing)
        made.append(ChildProcesses({1: child}, {1: reading}))
        return made[-1]

    yield start
    for one in made:
        one.end(0.0)


@pytest.mark.parametrize(
    "end", ["raise SystemExit(143)", "import os; os.kill(os.getpid(), 15)", "import os; os._exit(143)"]
)
def test_signalled_child_ends_parent(children, monkeypatch, end):
    """A child that left on a signal ends the process that waits for it."""
    monkeypatch.setattr(stop_agreement, "_stop_is_agreed", False)
    one = children(end)
    wait_until(lambda: one.stop_signal is not None)
    with pytest.raises(SystemExit) as caught:
        one.check()
    assert caught.value.code == 143 and one.failure is None
    assert signals.is_agreed(caught.value) is False


def test_agreed_stop_of_child(children, monkeypatch):
    """A child that was faster to an agreed stop does not end its parent."""
    monkeypatch.setattr(stop_agreement, "_stop_is_agreed", True)
    one = children("raise SystemExit(143)")
    wait_until(one._done.is_set)
    one.check()
    assert one.stop_signal is None and one.failure is None


STUCK = """
import sys, time
import torch.distributed as dist
from torchhal.distributed.signals import StopRequested, StopSignals

with StopSignals(lambda signum: None, grace=float(sys.argv[3])) as stop, stop.at_once():
    print("ready", flush=True)
    if sys.argv[1] == "in C":
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=2)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""


@pytest.mark.parametrize("where", ["in C", "in a loop that takes every exception"])
def test_who_can_t_be_interrupted_leaves(tmp_path, where):
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, where, str(tmp_path / "store"), "0.5"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143
    assert re.search(r"SIGTERM came \d s ago, before training, and has not ended the run: process \d+ leaves", said)
    assert "ProcessGroupGloo(" in said or 'File "<string>", line 12' in said  # where it was


def test_orderly_stop_in_notebook():
    """IPython asks an error that has it for what to show, instead of a traceback."""
    for signum, line in (
        (signal.SIGINT, "KeyboardInterrupt: stopped in order"),
        (signal.SIGTERM, "SystemExit: stopped"),
    ):
        assert exit_for_signal(signum)._render_traceback_()[0].startswith(line)


# -- several processes ---------------------------------------------------------------------------------------


class Lengthless(torch.utils.data.IterableDataset):
    """``count`` batches on rank 1, twice as many on rank 0."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        yield from torch.ones(self.count * (2 if os.environ["RANK"] == "0" else 1), 4)


class SignalledOnRankOne(Signalled):
    def signal_at(self, *place):
        if place == self.at and self.trainer.global_rank == 1:
            os.kill(os.getpid(), self.signum)

    def validation_step(self, batch, batch_idx):
        self.called.append(batch_idx)
        time.sleep(0.1)
        self.signal_at("validation_step", batch_idx)

    def training_step(self, batch, batch_idx):
        self.signal_at("training_step", batch_idx)
        return self.layer(batch[0]).mean()


def stop_with_batches_of_unknown_number(at, count):
    model = SignalledOnRankOne(at, signal.SIGTERM)
    trainer = torchhal.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=-1, num_sanity_val_steps=-1, limit_val_batches=1.0,
        check_val_every_n_epoch=1000, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(model, loader(), DataLoader(Lengthless(count), None))
    except SystemExit as error:
        return error.code, max(one for one in model.called if isinstance(one, int)), trainer.global_step
    return None


def test_signal_in_uneven_sanity_check(world2):
    """A signal in a sanity check of loaders of different lengths stops the ranks at one batch."""
    (code, first, step), (other_code, second, _) = world2.run(
        stop_with_batches_of_unknown_number, ("validation_step", 1), 60
    )
    assert code == other_code == 143 and step == 0
    assert first == second < 59  # ranks look for a stop every 0.25 s, and a batch takes 0.1 s


def test_stop_after_uneven_sanity_check(world2):
    """Ranks whose sanity check ended apart stop at one step."""
    (code, first, step), (other_code, second, other_step) = world2.run(
        stop_with_batches_of_unknown_number, ("training_step", 1), 6
    )
    assert code == other_code == 143 and step == other_step > 0
    assert (first, second) == (11, 5)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", slow("ddp_spawn"), slow("ddp_forkserver"), slow("torchrun")])
@pytest.mark.parametrize(
    ("at", "ranks", "who", "signum"),
    [
        ("setup", [0, 1], "group", signal.SIGINT),
        slow("setup", [0, 1], "group", signal.SIGTERM),
        ("prepare_data", [0], 0, signal.SIGTERM),  # while rank 1 waits for it
        slow("setup", [0], 1, signal.SIGTERM),  # who waits in a barrier, while rank 0 sleeps
        slow("on_fit_start", [1], 1, signal.SIGINT),  # while rank 0 waits in a collective of the sanity check
    ],
)
def test_signal_during_setup(start, tmp_path, strategy, at, ranks, who, signum):
    """A signal in the set-up ends all ranks."""
    job = start(strategy, at=at, ranks=ranks)
    for rank in ranks:
        wait_until((tmp_path / f"rank{rank}.json").exists)
    time.sleep(0.5)
    if who != "group":
        name = "rank" if who in ranks else "pid"
        who = json.loads((tmp_path / f"{name}{who}.json").read_text())["pid"]
    assert_stopped(stop(job, signum, who), signum)
    assert not (tmp_path / "trained").exists()
    if strategy == "ddp":
        assert f"torchhal: fit stopped on {signal.Signals(signum).name} before it began\n" in job.err, job.err
        assert who != "group" or (tmp_path / "cleaned0").exists()


SLOW_TO_IMPORT = """
import sys, time
from pathlib import Path

import torch
from torchhal import Module, Trainer

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

if __name__ == "__main__":
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", **options).fit(Net(), [torch.ones(2, 4)])
else:
    Path(__file__).with_name("importing").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, slow(signal.SIGTERM)])
def test_launcher_reports_early_stop(tmp_path, signum):
    """The launching process writes the line of a stop before a worker has begun."""
    script = tmp_path / "script.py"
    script.write_text(SLOW_TO_IMPORT)
    job = Job(sys.executable, script, PYTHONWARNINGS="ignore")
    job.strategy = "ddp_spawn"
    try:
        wait_until((tmp_path / "importing").exists)
        assert_stopped(stop(job, signum), signum)
    finally:
        job.kill()
    assert f"torchhal: fit stopped on {signal.Signals(signum).name} before it began\n" in job.err, job.err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_signal_at_random_moment(start, tmp_path, strategy):
    """Moments from the script's first line until training has begun, Ctrl-C and SIGTERM, to all or to the first."""
    choose = random.Random()
    job = start(strategy)
    # torchrun forgets a worker that it is about to start when the signal comes
    begun = [tmp_path / name for name in (("begun0", "begun1") if strategy == "torchrun" else ("begun",))]
    wait_until(lambda: all(file.exists() for file in begun))
    at = time.monotonic()
    wait_until((tmp_path / "trained").exists)
    whole = time.monotonic() - at + 0.5
    stop(job, signal.SIGTERM)
    for _ in range(MOMENTS):
        for file in (*begun, tmp_path / "trained"):
            file.unlink(missing_ok=True)
        signum, who = choose.choice([signal.SIGINT, signal.SIGTERM]), choose.choice(["group", "first"])
        moment = choose.uniform(0, whole)
        job = start(strategy)
        wait_until(lambda: all(file.exists() for file in begun))
        time.sleep(moment)
        try:
            assert_stopped(stop(job, signum, who if who == "group" else job.process.pid), signum)
        except AssertionError as error:
            raise AssertionError(f"{signum!r} to the {who}, {moment:.2f} of {whole:.2f} s") from error


@pytest.mark.slow
@pytest.mark.cold_start
@SIGNALS
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_signal_while_other_ranks_still_import(start, tmp_path, strategy, signum):
    """They leave at once, and rank 0 was waiting for them: for ten minutes."""
    job = start(strategy)
    wait_until((tmp_path / "begun").exists)
    wait_until(lambda: len(job.descendants()) > 1)
    time.sleep(1.5)  # rank 0 has come to its wait, the other to the middle of import torch
    assert_stopped(stop(job, signum), signum)
    assert not (tmp_path / "trained").exists()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="nothing tells what signals wait for a process")
def test_signal_during_long_import(tmp_path):
    """SIGTERM is blocked there until the main script is imported, and the others would wait for that."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, threading\n"
        "if __name__ != '__main__':\n"
        "    open(f'{os.path.dirname(__file__)}/pid{os.getpid()}', 'w').close()\n"
        "    threading.Event().wait(120)\n"
        "from torchhal import Module, Trainer\n"
        "class Net(Module):\n"
        "    def training_step(self, batch, batch_idx): pass\n"
        "    def configure_optimizers(self): pass\n"
        "if __name__ == '__main__':\n"
        "    Trainer(accelerator='cpu', devices=2, strategy='ddp_spawn').fit(Net(), [1])\n"
    )
    job = Job(sys.executable, script)
    job.strategy = "ddp_spawn"
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid*"))) == 2)
        pid = int(next(tmp_path.glob("pid*")).name.removeprefix("pid"))
        assert_stopped(stop(job, signal.SIGTERM, pid), signal.SIGTERM)
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.cold_start
def test_again_means_at_once(start, tmp_path):
    job = start("ddp", at="setup", ranks=[0, 1])
    wait_for_notes(tmp_path, 2)
    os.killpg(job.process.pid, signal.SIGINT)
    time.sleep(0.05)
    assert_stopped(stop(job, signal.SIGINT), signal.SIGINT)
