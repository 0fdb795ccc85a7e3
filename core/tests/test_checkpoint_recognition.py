"""Test which IO is named for a file: with a third party's on safetensors, and one from before ``recognizes``."""

import base64
import io
import json
import os
import shutil
import zipfile

import pytest
import torch
from minimal_net import BATCHES, Net
from quiet_trainer import make

from torchhal import cli, registry
from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError
from torchhal.pytree import map_tensors
from torchhal.testing import isolated_registry
from torchhal.trainer.callbacks import ModelCheckpoint

safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.timeout(60)


class SafetensorsIO(CheckpointIO):
    """A third party's IO: the tensors in safetensors' format, everything else in its metadata."""

    extension = ".safetensors"

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if storage_options:
            raise TypeError(f"storage_options {list(storage_options)}")
        tensors = {}  # numbered in the order of the walk

        def take(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors[str(len(tensors))] = leaf.detach().contiguous().clone()
            return torch.empty(0)

        plain = map_tensors(checkpoint, take)
        buffer = io.BytesIO()
        torch.save(plain, buffer)
        plain = base64.b64encode(buffer.getvalue()).decode()
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        temporary = os.path.join(os.path.dirname(os.path.abspath(path)), f".torchhal-{os.getpid()}-third.tmp")
        safetensors.save_file(tensors, temporary, metadata={"format": "third", "plain": plain})
        os.replace(temporary, path)

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        if not os.path.exists(path):
            raise FileNotFoundError(f"nothing at {path}")
        try:
            with safetensors.safe_open(path, "pt") as file:
                tensors = [file.get_tensor(str(number)) for number in range(len(file.keys()))]
                plain = base64.b64decode(file.metadata()["plain"])
            loaded = torch.load(io.BytesIO(plain), weights_only=True)
        except Exception as error:
            raise CheckpointCorruptError(f"{os.fspath(path)!r} is damaged: {error}") from error
        numbers = iter(tensors)
        return map_tensors(loaded, lambda leaf: next(numbers) if isinstance(leaf, torch.Tensor) else leaf)


class RecognizingIO(SafetensorsIO):
    def recognizes(self, path):
        try:
            with open(path, "rb") as file:
                head = file.read(64)
        except OSError:
            return False
        return len(head) > 8 and int.from_bytes(head[:8], "little") < 2**40 and head[8:9] == b"{"


class AnyFileIO(SafetensorsIO):
    """What a plugin of an earlier release may have: "exists" is that a file is there."""

    def exists(self, path):
        return os.path.isfile(path)


THIRD = {"recognizes": RecognizingIO, "default": SafetensorsIO, "any file": AnyFileIO}
OLD = {"default": SafetensorsIO, "any file": AnyFileIO}


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a fit, in core's format."""
    with isolated_registry():
        trainer = make(accelerator="cpu")
        trainer.fit(Net(), BATCHES)
        path = tmp_path / "saved" / "x.ckpt"
        trainer.save_checkpoint(path)
    return path


@pytest.fixture
def written(saved):
    """The same checkpoint, as the third party's IO writes it."""
    path = saved.parent / "y.bin"
    SafetensorsIO().save_checkpoint(TorchCheckpointIO().load_checkpoint(saved), path)
    return path


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "cut off":
        del data[len(data) // 2 :]
    elif how == "one bit":
        data[len(data) // 2] ^= 16
    elif how == "header":
        data[:16] = bytes(16)
    elif how == "a few bytes":
        del data[40:]
    elif how == "empty":
        data.clear()
    path.write_bytes(data)


@pytest.mark.parametrize("third", THIRD.values(), ids=THIRD)
@pytest.mark.parametrize("how", ["cut off", "one bit", "header", "a few bytes", "empty"])
def test_damaged_file_stays_damaged(saved, third, how):
    """Another installed IO is not named as the writer of a damaged file of the run's own."""
    damage(saved, how)
    with isolated_registry():
        registry.register("checkpoint_io", "third", third)
        with pytest.raises(CheckpointError) as caught:
            make(accelerator="cpu").fit(Net(), BATCHES, ckpt_path=saved)
        assert isinstance(caught.value, CheckpointCorruptError), caught.value
        assert "third" not in str(caught.value) and str(saved) in str(caught.value)


@pytest.mark.parametrize("how", ["whole", "cut off"])
def test_file_of_another_io_is_named(written, how):
    """The alias to use is in the error, by the file's content: its name ends as nothing of that IO does."""
    damage(written, how)
    with isolated_registry():
        registry.register("checkpoint_io", "third", RecognizingIO)
        with pytest.raises(CheckpointError, match=r"was written by checkpoint IO 'third'.*plugins=\['third'\]"):
            make(accelerator="cpu").fit(Net(), BATCHES, ckpt_path=written)


@pytest.mark.parametrize("third", [RecognizingIO, AnyFileIO])
def test_core_file_in_a_run_of_another_io(saved, third):
    """An IO of an earlier release loads what it says exists, as before; its own error follows."""
    with isolated_registry():
        registry.register("checkpoint_io", "third", third)
        expected = r"plugins=\['torch'\]" if third is RecognizingIO else "is damaged"
        with pytest.raises(CheckpointError, match=expected):
            make(accelerator="cpu", plugins="third").fit(Net(), BATCHES, ckpt_path=saved)


def test_damaged_file_of_the_own_third_party_io(written):
    damage(written, "cut off")
    with isolated_registry():
        registry.register("checkpoint_io", "third", RecognizingIO)
        with pytest.raises(CheckpointCorruptError, match="is damaged"):
            make(accelerator="cpu", plugins="third").fit(Net(), BATCHES, ckpt_path=written)


# -- ckpt_path="last" ----------------------------------------------------------------------------------------


def last(folder, **options):
    checkpoint = ModelCheckpoint(folder, save_top_k=0)
    trainer = make(checkpoint, accelerator="cpu", **options)
    trainer.fit(Net(), BATCHES, ckpt_path="last")
    return trainer


def test_last_names_another_io(written):
    (written.parent / "x.ckpt").unlink()
    with isolated_registry():
        registry.register("checkpoint_io", "third", RecognizingIO)
        with pytest.raises(CheckpointError, match=r"y\.bin' was written by checkpoint IO 'third'"):
            last(written.parent)


@pytest.mark.parametrize("third", THIRD.values(), ids=THIRD)
def test_last_takes_no_stray_file_for_a_checkpoint(tmp_path, third):
    """A text file beside the checkpoints was written by no IO: the run starts from the beginning."""
    (tmp_path / "notes.txt").write_text("hello")
    with isolated_registry():
        registry.register("checkpoint_io", "third", third)
        with pytest.warns(UserWarning, match="there is no checkpoint yet"):
            last(tmp_path)


@pytest.mark.parametrize("make_folder", [True, False])
def test_last_without_files_asks_no_plugin(tmp_path, monkeypatch, make_folder):
    """At the first start of a job there is nothing that another IO could have written."""
    folder = tmp_path / "new"
    if make_folder:
        folder.mkdir()
    with isolated_registry() as fresh:
        monkeypatch.setattr(fresh, "entries", lambda kind: pytest.fail(f"scanned for {kind}"))
        with pytest.warns(UserWarning, match="there is no checkpoint yet"):
            last(folder)


# -- names ---------------------------------------------------------------------------------------------------


class NoEnding(RecognizingIO):
    extension = ""


class Renamed(ModelCheckpoint):
    FILE_EXTENSION = ".pt"


@pytest.mark.parametrize(
    ("third", "callback", "names"),
    [
        (RecognizingIO, ModelCheckpoint, {"epoch=0-step=2.safetensors", "last.safetensors"}),
        (NoEnding, ModelCheckpoint, {"epoch=0-step=2", "last"}),
        (RecognizingIO, Renamed, {"epoch=0-step=2.pt", "last.pt"}),
        (TorchCheckpointIO, ModelCheckpoint, {"epoch=0-step=2.ckpt", "last.ckpt"}),
    ],
)
def test_names_end_as_the_io_says(tmp_path, third, callback, names):
    """Its own files are found again by "last", and the next one gets another name."""
    with isolated_registry():
        for expected in (names, names):
            trainer = make(callback(tmp_path, save_last=True), accelerator="cpu", plugins=third())
            trainer.fit(Net(), BATCHES)
            assert expected <= set(os.listdir(tmp_path))
        versioned = {name for name in os.listdir(tmp_path) if "-v1" in name}
        assert versioned and all(name.endswith(third.extension) or callback is Renamed for name in versioned)
        resumed = make(ModelCheckpoint(tmp_path), accelerator="cpu", plugins=third(), max_epochs=2)
        resumed.fit(Net(), BATCHES, ckpt_path="last")
        assert resumed.global_step == 4


def test_listing_without_recognizes_follows_the_extension(tmp_path):
    for name in ("a.safetensors", "b.ckpt", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert [os.path.basename(path) for path in SafetensorsIO().list_checkpoints(tmp_path)] == ["a.safetensors"]
    assert SafetensorsIO().exists(tmp_path / "b.ckpt")
    assert RecognizingIO().list_checkpoints(tmp_path) == [] and not RecognizingIO().exists(tmp_path / "a.safetensors")
    SafetensorsIO().save_checkpoint({"w": torch.ones(2)}, tmp_path / "c.bin")
    assert [os.path.basename(path) for path in RecognizingIO().list_checkpoints(tmp_path)] == ["c.bin"]


# -- the command line ----------------------------------------------------------------------------------------


def inspect(path, capsys):
    code = cli.main(["checkpoint", "inspect", str(path), "--json"])
    captured = capsys.readouterr()
    return (json.loads(captured.out)["checkpoint_io"] if code == 0 else None), captured.err


@pytest.mark.parametrize("third", THIRD.values(), ids=THIRD)
def test_inspect_finds_each_files_io(saved, written, third, capsys):
    """An IO of an earlier release is found by what it can read."""
    with isolated_registry():
        registry.register("checkpoint_io", "third", third)
        assert inspect(saved, capsys)[0] == "torch"
        assert inspect(written, capsys)[0] == "third"


@pytest.mark.parametrize("third", THIRD.values(), ids=THIRD)
@pytest.mark.parametrize("how", ["cut off", "header"])
def test_inspect_says_damaged(saved, third, how, capsys):
    damage(saved, how)
    with isolated_registry():
        registry.register("checkpoint_io", "third", third)
        found, error = inspect(saved, capsys)
    assert found is None and "third" not in error and str(saved) in error


def test_inspect_asks_the_io_of_the_ending(written, capsys):
    """A file that nobody recognises is opened by the IO whose ending it has."""
    named = written.with_suffix(".safetensors")
    shutil.move(written, named)
    damage(named, "header")
    with isolated_registry():
        registry.register("checkpoint_io", "third", RecognizingIO)
        assert "is damaged" in inspect(named, capsys)[1]


# -- core's own format ---------------------------------------------------------------------------------------


def test_core_recognizes_its_format(saved, tmp_path):
    own = TorchCheckpointIO()
    torch.save({"a": torch.ones(2)}, tmp_path / "plain.pt")
    for path in (saved, tmp_path / "plain.pt"):
        assert own.recognizes(path) and own.recognizes(str(path))
    for how in ("one bit", "cut off"):
        damage(saved, how)
        assert own.recognizes(saved)
    damage(saved, "header")
    assert not own.recognizes(saved)


def test_core_recognizes_no_format_around_its_own(saved):
    """A third party may put a header of its own in front of torch's file."""
    saved.write_bytes(b"ACME\0\0\0\1" + saved.read_bytes())
    assert not TorchCheckpointIO().recognizes(saved)


def foreign(folder):
    (folder / "empty").touch()
    (folder / "text").write_text("PK\x03\x04 is how a zip begins")
    (folder / "folder").mkdir()
    (folder / "nowhere").symlink_to(folder / "missing")
    with zipfile.ZipFile(folder / "zip", "w") as file:
        file.writestr("weights/data.npy", "x")
    safetensors.save_file({"w": torch.ones(2)}, folder / "safetensors")
    os.mkfifo(folder / "pipe")
    (folder / "pickle").write_bytes(b"\x80\x02}q\x00.")
    return ["empty", "text", "folder", "nowhere", "zip", "safetensors", "pipe", "pickle", "missing"]


def test_core_recognizes_nothing_else(tmp_path):
    for name in foreign(tmp_path):
        assert TorchCheckpointIO().recognizes(tmp_path / name) is False, name


def test_default_recognizes_nothing(written):
    assert SafetensorsIO().recognizes(written) is False and SafetensorsIO().exists(written)
