"""A run deletes and replaces what it wrote itself, in its own folder, and nothing else."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import limits
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Callback, ModelCheckpoint, Module, Trainer
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.checkpoint._local_file import LocalPlace
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.strategies import DDPStrategy
from torchhal.trainer.callbacks import _run_ownership as run_ownership
from torchhal.trainer.callbacks._checkpoint_records import new_run_id, runs_beside
from torchhal.trainer.callbacks._run_takeover import take_over
from torchhal.trainer.callbacks._written_files import WrittenFiles

HERE = f"{Path(__file__).parent}:{Path(limits.__file__).parent}"


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder, steps, ckpt_path=None, callbacks=None, **options):
    """One save per step."""
    options = {"filename": "{step}", "every_n_train_steps": 1, **options}
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=steps,
        callbacks=callbacks or [ModelCheckpoint(folder, **options)],
    )  # fmt: skip
    trainer.fit(Net(), torch.ones(9, 1, 2), ckpt_path=ckpt_path)
    return trainer


def saves_in(folders):
    """Callbacks that differ, or each would resume with the other's files."""
    return [
        ModelCheckpoint(folder, f"{number}-{{step}}" if number else "{step}", every_n_train_steps=1, save_last=True)
        for number, folder in enumerate(folders)
    ]


def adopt(path, run=None):
    """What saves in a fit that continues from this file."""
    files = WrittenFiles(run or new_run_id(), "w")
    files.continues(str(path))
    for _, _, left in take_over([(files, os.path.dirname(path))], wait=True):
        time.sleep(min(left, 0.05))
    return files


def owners(folder):
    """What the owner files in a folder say, by name."""
    return {path.name: path.read_text() for path in sorted((folder / ".torchhal").glob("*.owner-*"))}


def names(folder):
    return sorted(name for name in os.listdir(folder) if name != ".torchhal")


def change(path, **values):
    """Alter the state of the only callback in a checkpoint."""
    checkpoint = torch.load(path, weights_only=True)
    checkpoint.pop("digests", None)
    [state] = checkpoint["callbacks"].values()
    state.update(values)
    torch.save(checkpoint, path)


# -- deleting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("field", ["_doomed", "_newest", "_interrupted", "last_model_path", "best_model_path"])
def test_paths_in_state_are_not_deleted(tmp_path, field, inside):
    """A path in a callback's state is no reason to delete the file."""
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    elsewhere.mkdir()
    fit(runs, 2)
    victims = [(runs if inside else elsewhere) / name for name in ("thesis.tex", "mine.ckpt")]
    victims[0].write_text("years of work")
    shutil.copy(runs / "step=2.ckpt", victims[1])
    for victim in victims:
        change(runs / "step=2.ckpt", **{field: [str(victim)] if field == "_doomed" else str(victim)})
        fit(runs, 5, ckpt_path=runs / "step=2.ckpt")
        assert victim.exists()


def test_resumed_copy_deletes_no_foreign_files(tmp_path):
    """A run that resumes from a copy deletes no files of the run that is there now."""
    runs, copy = tmp_path / "runs", tmp_path / "copy.ckpt"
    fit(runs, 2)
    shutil.copy(runs / "step=2.ckpt", copy)
    shutil.rmtree(runs)
    fit(runs, 2, save_last=True)
    before = {name: (runs / name).read_bytes() for name in names(runs)}
    fit(runs, 6, ckpt_path=copy, save_last=True)
    assert {name: (runs / name).read_bytes() for name in before} == before
    assert set(names(runs)) == {"step=2.ckpt", "last.ckpt", "step=6.ckpt", "last-v1.ckpt"}


def test_resumed_run_owns_previous_files(tmp_path):
    """A resumed run continues with the files of the one before."""
    fit(tmp_path, 2, save_last=True)
    run = fit(tmp_path, 4, ckpt_path="last", save_last=True).run_id
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    records = sorted(os.listdir(tmp_path / ".torchhal"))
    assert records == [f"{run}.owner-1", "last.ckpt.json", "step=4.ckpt.json"]


def test_so_do_its_callbacks_in_other_folders(tmp_path):
    def callbacks():
        every = {"every_n_train_steps": 1}
        return [
            ModelCheckpoint(tmp_path / "newest", "{step}", **every),
            ModelCheckpoint(tmp_path / "kept", "{step}", monitor="step", mode="max", save_last=True, **every),
        ]

    fit(None, 2, callbacks=callbacks())
    fit(None, 4, callbacks=callbacks(), ckpt_path=tmp_path / "kept" / "step=2.ckpt")
    assert names(tmp_path / "newest") == ["step=4.ckpt"] and names(tmp_path / "kept") == ["last.ckpt", "step=4.ckpt"]


def test_refused_resume_starts_new_run(tmp_path):
    """A fit after a refused resumption is a run of its own."""

    class Other(Net):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    fit(tmp_path, 2, save_last=True)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    trainer = fit(tmp_path / "elsewhere", 0)
    trainer.callbacks = [ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_last=True)]
    with pytest.raises(CheckpointError, match="holds the state of the optimizer"):
        trainer.fit(Other(), torch.ones(9, 1, 2), ckpt_path=tmp_path / "last.ckpt")
    trainer.max_steps = 2
    trainer.fit(Other(), torch.ones(9, 1, 2))
    for name, content in before.items():
        assert (tmp_path / name).read_bytes() == content, name


def test_replaced_file_is_kept(tmp_path):
    """A file that somebody put in the place of the run's own stays."""

    class Replaces(ModelCheckpoint):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 2:
                os.replace(tmp_path / "notes", tmp_path / "step=2.ckpt")

    (tmp_path / "notes").write_text("not a checkpoint")
    fit(tmp_path, 4, callbacks=[Replaces(tmp_path, "{step}", every_n_train_steps=1)])
    assert (tmp_path / "step=2.ckpt").read_text() == "not a checkpoint"
    assert names(tmp_path) == ["step=2.ckpt", "step=4.ckpt"]


def test_files_of_other_callback_are_kept(tmp_path):
    """A file that another callback of the run wrote is not the callback's own."""
    each = ModelCheckpoint(tmp_path, "a-{step}", every_n_train_steps=1)
    other = ModelCheckpoint(tmp_path, "b-{step}", every_n_train_steps=1)
    fit(tmp_path, 2, callbacks=[each, other])
    checkpoint = torch.load(tmp_path / "a-step=2.ckpt", weights_only=True)
    del checkpoint["digests"]
    checkpoint["callbacks"][each.state_key]["_newest"] = str(tmp_path / "b-step=2.ckpt")
    torch.save(checkpoint, tmp_path / "a-step=2.ckpt")
    fit(tmp_path, 3, tmp_path / "a-step=2.ckpt", [ModelCheckpoint(tmp_path, "a-{step}", every_n_train_steps=1)])
    assert (tmp_path / "b-step=2.ckpt").exists()


# -- replacing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["last.ckpt", "step=4.ckpt"])
@pytest.mark.parametrize("kind", ["text", "empty", "folder", "dangling link", "pipe"])
def test_somebodys_file_of_that_name_stays(tmp_path, name, kind):
    path = tmp_path / name
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nothing")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("mine" if kind == "text" else "")
    before = os.lstat(path)
    fit(tmp_path, 4, save_last=True)
    after = os.lstat(path)
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    assert f"{path.stem}-v1.ckpt" in names(tmp_path)


def test_without_versions_only_checkpoints_are_overwritten(tmp_path):
    fit(tmp_path, 2, filename="best", enable_version_counter=False)
    fit(tmp_path, 3, filename="best", enable_version_counter=False)
    assert names(tmp_path) == ["best.ckpt"]
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] == 3
    (tmp_path / "best.ckpt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"best\.ckpt' is there and is no checkpoint.*move it away"):
        fit(tmp_path, 2, filename="best", enable_version_counter=False)
    assert (tmp_path / "best.ckpt").read_text() == "mine"


RUN = """
import sys, torch
sys.path += sys.argv[1].split(":")
from test_written_files import Net, Trainer, ModelCheckpoint
from torchhal import Callback

class Together(Callback):
    def on_train_batch_end(self, trainer, *args):
        print(trainer.global_step, flush=True)
        input()

folder, own = sys.argv[2:]
saves = ModelCheckpoint(folder, "x", every_n_train_steps=1, save_last=True)
trainer = Trainer(
    accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=4,
    callbacks=[Together(), saves],
)
trainer.fit(Net(), torch.ones(9, 1, 2))
print(saves.best_model_path, saves.last_model_path, flush=True)
"""


@pytest.mark.slow
def test_concurrent_runs_in_one_folder(tmp_path):
    """Both come to each save at the same time."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, HERE, str(tmp_path), str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    for step in range(1, 5):
        assert [run.stdout.readline().split() for run in runs] == [[str(step)]] * 2
        for run in runs:
            run.stdin.write("\n")
            run.stdin.flush()
    paths = [run.communicate(timeout=limits.scaled(60))[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert len({path for own in paths for path in own}) == 4
    assert names(tmp_path) == sorted(os.path.basename(path) for own in paths for path in own)
    for path in itertools.chain(*paths):
        assert torch.load(path, weights_only=True)["global_step"] == 4


# -- the record --------------------------------------------------------------------------------------------------------


def test_one_of_many_gets_a_name(tmp_path):
    import concurrent.futures

    path = str(tmp_path / "x.ckpt")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for number in range(50):
            got = [*pool.map(lambda _, path=f"{path}{number}": WrittenFiles(new_run_id(), "w").claim(path), range(8))]
            assert sum(got) == 1


@pytest.mark.parametrize("url", [False, True])
def test_claims_and_versions_of_files(tmp_path, url):
    """A claim to a file is given back, and a changed version ends it."""
    import fsspec

    path = f"memory://records-{tmp_path.name}/x.ckpt" if url else str(tmp_path / "x.ckpt")

    def write(content):
        with fsspec.open(path, "wb") as file:
            file.write(content)

    mine, other = WrittenFiles(new_run_id(), "w"), WrittenFiles(new_run_id(), "w")
    assert mine.claim(path) and not other.claim(path)
    mine.release(path)
    assert other.claim(path) and not mine.claim(path)
    other.release(path)
    assert mine.claim(path)
    write(b"one")
    mine.wrote(path)
    mine.release(path)  # it is there
    assert mine.owns(path) and not other.owns(path) and not other.claim(path)
    again = adopt(path)
    assert again.owns(path) and again.run == mine.run
    write(b"three")
    assert not mine.owns(path) and not mine.claim(path)
    stranger = adopt(path)
    assert stranger.run not in (mine.run, other.run)


ADOPTING = """
import sys, time
from pathlib import Path
sys.path += sys.argv[3].split(":")
from test_written_files import adopt
folder, name = Path(sys.argv[1]), sys.argv[2]
(folder / name).touch()
while len(list(folder.glob("process*"))) < 3:
    time.sleep(0.001)
for number in range(20):
    files = adopt(folder / f"{number}.ckpt", "0" * 16)
    print(number, files.run, flush=True)
sys.stdin.read()
"""


def test_finished_run_adopted_once(tmp_path):
    """Two jobs that resume from one folder would delete each other's files."""
    (tmp_path / "process0").touch()
    wrote = "import sys; from torchhal.trainer.callbacks._checkpoint_records import new_run_id\n"
    wrote += "from torchhal.trainer.callbacks._written_files import WrittenFiles\n"
    wrote += "for n in range(20):\n path = f'{sys.argv[1]}/{n}.ckpt'; files = WrittenFiles(new_run_id(), 'w')\n"
    wrote += " assert files.claim(path); open(path, 'w').close(); files.wrote(path)"
    subprocess.run([sys.executable, "-c", wrote, tmp_path], check=True, timeout=60)
    for _ in range(2):  # those who continued the runs are over, too
        both = [
            subprocess.Popen(
                [sys.executable, "-c", ADOPTING, tmp_path, f"process{number}", HERE], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )
            for number in (1, 2)
        ]  # fmt: skip
        lines = [[process.stdout.readline().split() for _ in range(20)] for process in both]
        for process in both:
            process.communicate(timeout=60)
        for one, other in zip(*lines, strict=True):
            assert one[0] == other[0]
            assert sum(int(run, 16) != 0 for run in (one[1], other[1])) == 1
        for name in ("process1", "process2"):
            (tmp_path / name).unlink()
    assert len([name for name in os.listdir(tmp_path / ".torchhal") if ".owner-" in name]) == 20


ON_ANOTHER_HOST = """
import socket, sys
sys.path += sys.argv[1].split(":")
socket.gethostname = lambda: "another"
from torchhal.trainer.callbacks import _run_ownership
_run_ownership.RENEWED_S = 0.1
from test_written_files import fit, saves_in
from torchhal import Callback

class Waits(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            print("saved", flush=True)
            input()

fit(None, 5, callbacks=[*saves_in(sys.argv[2:]), Waits()])
"""


@pytest.fixture
def on_another_host(tmp_path):
    """Start a fit that saves in the folders it is given and stands, alive, after its third step."""
    started = []

    def start(*folders):
        command = [sys.executable, "-c", ON_ANOTHER_HOST, HERE, *map(str, folders)]
        there = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(there)
        assert there.stdout.readline() == "saved\n"
        return there

    yield start
    for there in started:
        with there:
            there.kill()


def test_run_on_other_host_adopted_when_over(tmp_path, on_another_host, monkeypatch):
    """While it lives nothing of its own is deleted or replaced; killed, its files are those of the run that resumes."""
    there = on_another_host(tmp_path)
    before = names(tmp_path)
    monkeypatch.setattr(run_ownership, "EXPIRES_S", limits.scaled(30.0))  # waited for only if it said nothing
    fit(tmp_path, 4, ckpt_path="last", save_last=True)
    assert names(tmp_path) == sorted([*before, "last-v1.ckpt", "step=4.ckpt"])
    (tmp_path / "step=4.ckpt").unlink()
    (tmp_path / "last-v1.ckpt").unlink()
    there.kill()
    there.wait()
    monkeypatch.setattr(run_ownership, "EXPIRES_S", 0.5)
    fit(tmp_path, 6, ckpt_path="last", save_last=True)
    assert names(tmp_path) == ["last.ckpt", "step=6.ckpt"]


def test_adoption_precedes_training(tmp_path, on_another_host, monkeypatch):
    """Not in the midst of training; and whoever sits at the terminal hears what is waited for."""
    folders, waited, said = [tmp_path / "a", tmp_path / "b"], [], []

    class Trains(Callback):
        def on_train_batch_start(self, *args):
            monkeypatch.setattr(time, "sleep", lambda s: pytest.fail("a run waited in the midst of training"))

    there = on_another_host(*folders)
    there.kill()
    there.wait()
    monkeypatch.setattr(run_ownership, "EXPIRES_S", 2.5)
    monkeypatch.setattr(Trainer, "announce", lambda self, line: said.append(line))
    for folder in folders:  # both as if said just now
        for owner in (folder / ".torchhal").glob("*.owner-*"):
            os.utime(owner)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: (waited.append(s), sleep(s)))
    trainer = fit(None, 5, ckpt_path=folders[1] / "last.ckpt", callbacks=[*saves_in(folders), Trains()])
    assert sum(waited) > 1 and max(waited) <= 1
    assert [names(folder) for folder in folders] == [["last.ckpt", "step=5.ckpt"], ["1-step=5.ckpt", "last.ckpt"]]
    [line] = [line for line in said if "waits for" in line]
    assert f"s at most to see whether run {trainer.run_id} in {str(folders[1])!r} still lives" in line


def wrote(path):
    """What has saved one file as its run, and holds it."""
    files = WrittenFiles(new_run_id(), "w")
    assert files.hold(str(path)) and files.claim(str(path))
    path.touch()
    files.wrote(str(path))
    return files


def elsewhere(files, number=0, content='{"machine": "00000000", "process": 1}', folder=None):
    """Let a process of another host be the one of that run, instead of whoever is."""
    run_ownership.stop_renewing(files.ownership)
    folder = folder or Path(next(iter(files.ownership.held))) / ".torchhal"
    for owner in folder.glob("*.owner-*"):
        owner.unlink()
    (owner := folder / f"{files.run}.owner-{number}").write_text(content)
    return owner


def test_run_adopted_elsewhere_is_lost(tmp_path):
    """A run that another host has continued meanwhile is another one from then on."""
    stood_still = wrote(tmp_path / "last.ckpt")
    elsewhere(stood_still, 1)
    assert not stood_still.hold(str(tmp_path / "last.ckpt"))
    assert not stood_still.owns(str(tmp_path / "last.ckpt")) and not stood_still.claim(str(tmp_path / "last.ckpt"))
    assert stood_still.hold(str(tmp_path / "last.ckpt"))


def test_run_lost_during_renewal(tmp_path, monkeypatch):
    """Two hosts came and went: the file that it brings back is the only one of its number and of the next."""
    stood_still = wrote(tmp_path / "last.ckpt")
    own = tmp_path / ".torchhal" / f"{stood_still.run}.owner-0"
    os.utime(own, (1, 1))
    write = LocalPlace.write

    def late(place, content):
        elsewhere(stood_still, 2)
        write(place, content)

    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "write", late)
        stood_still.ownership.renew()
    assert not own.exists() and not stood_still.hold(str(tmp_path / "last.ckpt"))


def test_lost_run_warns_in_fit(tmp_path):
    """A fit warns when it has become a run of its own."""

    class StandsStill(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 2:
                elsewhere(trainer.checkpoint_callback._writer.files, 1)

    with pytest.warns(UserWarning, match=r"as a run of its own from here on.*another process has gone on") as said:
        fit(None, 4, callbacks=[StandsStill(), *saves_in([tmp_path])])
    assert len([warning for warning in said if "of its own" in str(warning.message)]) == 1
    assert names(tmp_path) == ["last-v1.ckpt", "last.ckpt", "step=2.ckpt", "step=4.ckpt"]


def test_second_fit_keeps_run_alive(tmp_path):
    """Or another process would continue its run while it trains."""
    seen = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, *args):
            seen.append(owners(tmp_path))

    trainer = fit(None, 2, callbacks=[Looks(), *saves_in([tmp_path])])
    assert '"over": true' in "".join(owners(tmp_path).values())
    seen.clear()
    trainer.max_steps = 4
    trainer.fit(Net(), torch.ones(9, 1, 2))
    fit(None, 6, ckpt_path="last", callbacks=[Looks(), *saves_in([tmp_path])])
    assert len(seen) == 4 and all(len(texts) == 1 for texts in seen)
    assert "over" not in "".join(text for texts in seen for text in texts.values())
    assert names(tmp_path) == ["last.ckpt", "step=6.ckpt"]


def test_adoption_of_own_run_renews_file(tmp_path):
    """A process that continues its own run renews the owner file at once."""
    path = tmp_path / "last.ckpt"
    one = wrote(path)
    run_ownership.stop_renewing(one.ownership)
    [name], [before] = owners(tmp_path).keys(), owners(tmp_path).values()
    assert adopt(path).run == one.run
    assert owners(tmp_path).keys() == {name} and owners(tmp_path)[name] != before


@pytest.mark.parametrize("content", ["", '{"machine": "0000', "[]", "\0" * 40], ids=["empty", "torn", "other", "zeros"])
def test_unreadable_owner_file_expires(tmp_path, monkeypatch, content):
    """It is what a host leaves that crashes while it renews it."""
    path = tmp_path / "last.ckpt"
    monkeypatch.setattr(run_ownership, "EXPIRES_S", 0.5)
    owner = elsewhere(crashed := wrote(path), content=content)
    start = time.monotonic()
    assert adopt(path).run == crashed.run and time.monotonic() - start > 0.4
    monkeypatch.setattr(run_ownership, "EXPIRES_S", 3600.0)
    owner = elsewhere(crashed, content=content)
    os.utime(owner, (1, 1))
    assert adopt(path).run == crashed.run


def test_renewal_survives_file_system_errors(tmp_path, monkeypatch, caplog):
    """Those of fsspec raise what they like."""
    monkeypatch.setattr(run_ownership, "RENEWED_S", 0.01)
    tried, failing = [], threading.Event()
    write = LocalPlace.write

    def fails(place, content):
        if ".owner-" in place.shown:
            tried.append(content)
            if failing.is_set():
                raise RuntimeError("503")
        write(place, content)

    monkeypatch.setattr(LocalPlace, "write", fails)

    def await_renewals():
        tried.clear()
        until = time.monotonic() + limits.scaled(30)
        while len(tried) < 3:
            assert time.monotonic() < until, "nobody renews the file"
            time.sleep(0.01)

    with caplog.at_level("WARNING", "torchhal"):
        failing.set()
        files = wrote(tmp_path / "last.ckpt")
        await_renewals()
        failing.clear()
        [before] = owners(tmp_path).values()
        await_renewals()
        assert [before] != [*owners(tmp_path).values()]
        failing.set()
        files.let_go()
    [line] = [record.getMessage() for record in caplog.records]
    assert "could not be renewed" in line and "RuntimeError: 503" in line and files.run in line


def test_hold_lists_no_folder(tmp_path, monkeypatch):
    """A save reads a constant number of files and lists no folder."""
    files = wrote(tmp_path / "last.ckpt")

    def lists(place):
        raise AssertionError(f"{place.shown} was listed")

    monkeypatch.setattr(LocalPlace, "children", lists)
    assert files.hold(str(tmp_path / "last.ckpt"))


def test_killed_adoption_leaves_no_files(tmp_path, monkeypatch):
    """A process that is killed while it asks for the time leaves nothing for good."""
    path = tmp_path / "last.ckpt"
    monkeypatch.setattr(run_ownership, "EXPIRES_S", 0.2)
    elsewhere(files := wrote(path))
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "remove", lambda place: None)
        patch.setattr(time, "sleep", lambda s: elsewhere(files))
        assert adopt(path).run != files.run
    assert adopt(path).run == files.run
    assert sorted(os.listdir(tmp_path / ".torchhal")) == [f"{files.run}.owner-1", "last.ckpt.json"]


def test_failed_setup_adopts_nothing(tmp_path):
    """A fit whose set-up fails later does not adopt the run of its checkpoint."""

    class NoData(Net):
        def train_dataloader(self):
            raise RuntimeError("the data is not there")

    fit(None, 2, callbacks=saves_in([tmp_path]))
    before, threads = owners(tmp_path), {*threading.enumerate()}
    trainer = fit(tmp_path / "elsewhere", 0)
    trainer.callbacks = saves_in([tmp_path])
    with pytest.raises(RuntimeError, match="the data is not there"):
        trainer.fit(NoData(), ckpt_path=tmp_path / "last.ckpt")
    assert owners(tmp_path) == before
    assert not [each for each in {*threading.enumerate()} - threads if each.name == "torchhal-renews-run"]


class WaitsLonger(Callback):
    """For another host, in a worker, than the ranks do for each other."""

    def setup(self, trainer, module, stage):
        run_ownership.EXPIRES_S = 2 * trainer.strategy.timeout.total_seconds()
        for owner in Path(trainer.checkpoint_callback.dirpath).glob(".torchhal/*.owner-*"):
            os.utime(owner)  # as long as ever


@pytest.mark.slow
def test_adoption_may_exceed_rank_timeout(tmp_path):
    """The wait for another host may be longer than the ranks' timeout for each other."""
    earlier = fit(None, 2, callbacks=saves_in([tmp_path]))
    elsewhere(earlier.checkpoint_callback._writer.files, folder=tmp_path / ".torchhal")
    trainer = Trainer(
        accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=4,
        strategy=DDPStrategy(start_method="spawn", timeout=timedelta(seconds=limits.scaled(5.0))),
        callbacks=[WaitsLonger(), *saves_in([tmp_path])],
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(torch.ones(18, 2)), ckpt_path=tmp_path / "last.ckpt")
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"] and trainer.run_id == earlier.run_id


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"run": "x"}', b"\xff",
        b'{"run": "../../x", "writer": "w", "version": null, "machine": "", "process": 1}',
        b'{"run": "0123456789abcdef", "writer": "w", "version": null, "machine": "", "process": "1"}',
    ],
)  # fmt: skip
def test_a_damaged_record_proves_nothing(tmp_path, content):
    path = tmp_path / "x.ckpt"
    mine = WrittenFiles(new_run_id(), "w")
    assert mine.claim(str(path))
    path.write_text("x")
    mine.wrote(str(path))
    (tmp_path / ".torchhal" / "x.ckpt.json").write_bytes(content)
    assert not mine.owns(str(path)) and not mine.claim(str(path))
    assert adopt(path, own := new_run_id()).run == own and os.listdir(tmp_path / ".torchhal") == ["x.ckpt.json"]
    path.unlink()
    assert mine.claim(str(path))


def test_a_failed_save_leaves_no_claim(tmp_path, monkeypatch):
    def fails(*args, **options):
        raise CheckpointError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(TorchCheckpointIO, "save_checkpoint", fails)
        with pytest.raises(CheckpointError, match="no room"):
            fit(tmp_path, 2)
    assert not [name for name in os.listdir(tmp_path / ".torchhal") if name.endswith(".json")]
    fit(tmp_path, 1)
    assert names(tmp_path) == ["step=1.ckpt"]


# -- which is the last -------------------------------------------------------------------------------------------------


def test_a_clock_that_goes_back_changes_nothing(tmp_path, monkeypatch):
    fit(tmp_path, 2, save_top_k=-1)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 2 * 3600 * 10**9)
    trainer = fit(tmp_path, 4, ckpt_path="last", save_top_k=-1)
    assert trainer.ckpt_path == str(tmp_path / "step=2.ckpt")
    assert fit(tmp_path, 5, ckpt_path="last", save_top_k=-1).ckpt_path == str(tmp_path / "step=4.ckpt")
    listed = TorchCheckpointIO().list_checkpoints(tmp_path)
    assert [Path(path).name for path in listed] == [f"step={step}.ckpt" for step in range(1, 6)]


LATER = """
import sys, time
sys.path += sys.argv[1].split(":")
back = int(sys.argv[3]) * 3600 * 10**9
now, wall = time.time_ns, time.time
time.time_ns, time.time = lambda: now() - back, lambda: wall() - back / 1e9
from test_written_files import fit
print(fit(sys.argv[2], int(sys.argv[4]), ckpt_path="last", save_top_k=-1).ckpt_path)
"""


@pytest.mark.slow
def test_so_do_the_clocks_of_several_hosts(tmp_path):
    """Each life of the run on a host whose clock is two hours behind the one before."""
    for life in range(3):
        hours, steps = str(2 * life), str(2 * life + 2)
        command = [sys.executable, "-c", LATER, HERE, str(tmp_path), hours, steps]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limits.scaled(60), check=False)
        assert done.returncode == 0, done.stderr
        expected = "None" if life == 0 else str(tmp_path / f"step={2 * life}.ckpt")
        assert done.stdout.split()[-1] == expected


def test_last_of_two_folders(tmp_path, monkeypatch):
    """ "last" of two folders is the checkpoint that was saved later."""

    def callbacks():
        return [
            ModelCheckpoint(tmp_path / "often", "{step}", every_n_train_steps=1),
            ModelCheckpoint(tmp_path / "rarely", "{step}", every_n_train_steps=3),
        ]

    now = time.time_ns
    fit(None, 4, callbacks=callbacks())
    os.utime(tmp_path / "rarely" / "step=3.ckpt", (2**31, 2**31))  # copied, touched, restored from a backup
    monkeypatch.setattr(time, "time_ns", lambda: now() - 10**15)
    trainer = fit(None, 5, ckpt_path="last", callbacks=callbacks())
    assert trainer.ckpt_path == str(tmp_path / "often" / "step=4.ckpt")


class Beside(Callback):
    """Another run, from its first to its last step, in the midst of this one."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 2:
            fit(self.folder, 3, filename="beside-{step}")


def fit_beside(folder):
    fit(None, 4, callbacks=[Beside(folder), ModelCheckpoint(folder, "{step}", every_n_train_steps=1)])


def test_last_of_concurrent_runs_refused(tmp_path):
    """ "last" of two concurrent runs is refused as ambiguous."""
    fit(tmp_path, 1, filename="before-{step}")  # which is over when the others begin
    fit_beside(tmp_path)
    before = names(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path, 9, ckpt_path="last")
    said = str(caught.value)
    assert f"'{tmp_path / 'step=4.ckpt'}', '{tmp_path / 'beside-step=3.ckpt'}'." in said and "ckpt_path=PATH" in said
    assert "before" not in said
    assert names(tmp_path) == before == ["before-step=1.ckpt", "beside-step=3.ckpt", "step=4.ckpt"]


@pytest.mark.parametrize("chosen", ["step=4.ckpt", "beside-step=3.ckpt"])
def test_named_run_becomes_last(tmp_path, chosen):
    """After one of two runs was named and has saved it is the last one."""
    fit_beside(tmp_path)
    fit(tmp_path, 5, ckpt_path=tmp_path / chosen)
    assert fit(tmp_path, 6, ckpt_path="last").ckpt_path == str(tmp_path / "step=5.ckpt")


def test_last_of_successive_runs(tmp_path):
    """Of successive runs in one folder the later one is continued."""
    fit(tmp_path, 4, filename="first-{step}")
    fit(tmp_path, 2)
    trainer = fit(tmp_path, 3, ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "step=2.ckpt")
    assert fit(tmp_path, 4, ckpt_path="last").run_id == trainer.run_id, "as a requeued job is"


def test_records_without_times(tmp_path):
    """Records of an earlier release hold no times, and the newest file is the last."""
    fit_beside(tmp_path)
    for path in (tmp_path / ".torchhal").glob("*.ckpt.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({name: record[name] for name in ("run", "writer", "version", "machine", "process")}))
    assert fit(tmp_path, 5, ckpt_path="last").ckpt_path == str(tmp_path / "step=4.ckpt")


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, True),
        ({"format": 3}, False),
        ({"began_ns": "long ago"}, False),
        ({"began_ns": 2**62}, False),
        ({"ancestors": 5}, True),
        ({"ancestors": [5, "../x"]}, True),
    ],
)
def test_damaged_record_times_ignored(tmp_path, changed, refused):
    """Times in a damaged record are ignored."""
    fit_beside(tmp_path)
    path = tmp_path / ".torchhal" / "step=4.ckpt.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    try:
        fit(tmp_path, 5, ckpt_path="last")
    except ConfigurationError:
        assert refused
    else:
        assert not refused


def save_as(files, path):
    files.claim(str(path))
    TorchCheckpointIO().save_checkpoint({"state_dict": {}}, str(path))
    files.wrote(str(path))
    return str(path)


def test_continued_run_keeps_ancestors(tmp_path):
    """The one before still saves, on a host that stood still for a minute, when the new one has begun."""
    before = WrittenFiles(new_run_id(), "w")
    list(take_over([(before, str(tmp_path))], wait=False))
    start = save_as(before, tmp_path / "a.ckpt")
    after, stranger = WrittenFiles(new_run_id(), "w"), WrittenFiles(new_run_id(), "w")
    after.continues(start)
    after.continued["machine"] = "elsewhere"  # which can't be asked, so that it may live
    list(take_over([(after, str(tmp_path))], wait=False))
    list(take_over([(stranger, str(tmp_path))], wait=False))
    assert after.run != before.run and after.ancestors == [before.run]
    io = TorchCheckpointIO()
    save_as(before, tmp_path / "b.ckpt")
    newest = save_as(after, tmp_path / "c.ckpt")
    assert runs_beside(newest, io.list_checkpoints(tmp_path), io.saved_ns, None) == []
    newest = save_as(before, tmp_path / "d.ckpt")
    assert runs_beside(newest, io.list_checkpoints(tmp_path), io.saved_ns, None) == []
    other = save_as(stranger, tmp_path / "e.ckpt")
    newest = save_as(after, tmp_path / "f.ckpt")
    assert runs_beside(newest, io.list_checkpoints(tmp_path), io.saved_ns, None) == [other]
