"""Checkpoints that are folders: what is there, what may be replaced, and that one folder takes another's place."""

import os
import signal
import threading
import time
import unittest.mock
from pathlib import Path

import pytest
import torch

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.checkpoint import _temp_files as temp_files
from torchhal.checkpoint import folder as folders
from torchhal.checkpoint._local_file import sync_folder
from torchhal.checkpoint._map_location import apply_map_location
from torchhal.checkpoint.folder import FolderCheckpointIO, swap_directories
from torchhal.errors import CheckpointError


class Shelf(FolderCheckpointIO):
    """Keeps text."""

    marker = "done"
    described = "shelf"

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        with self.new_folder(path) as folder:
            for name, text in checkpoint.items():
                (folder / name).write_text(text)
            (folder / self.marker).write_text("")
            sync_folder(folder)
            swap_directories(folder, path)

    def open_checkpoint(self, path):
        return {file.name: file.read_text() for file in path.iterdir() if file.name != self.marker}


def test_a_save_replaces_all_and_leaves_nothing_beside(tmp_path):
    io, path = Shelf(), tmp_path / "new" / "c.ckpt"
    io.save_checkpoint({"a": "1", "b": "2"}, path)
    io.save_checkpoint({"a": "3"}, path)
    assert io.load_checkpoint(path) == {"a": "3"}
    assert os.listdir(path.parent) == ["c.ckpt"]
    assert io.list_checkpoints(path.parent) == [str(path)]
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    assert os.listdir(path.parent) == io.list_checkpoints(path.parent) == []
    assert io.list_checkpoints(tmp_path / "nowhere") == []


def test_a_save_that_fails_leaves_what_was_there(tmp_path):
    io, path = Shelf(), tmp_path / "c.ckpt"
    io.save_checkpoint({"a": "1"}, path)
    with pytest.raises(TypeError):
        io.save_checkpoint({"a": "2", "b": 3}, path)
    assert io.load_checkpoint(path) == {"a": "1"}
    assert os.listdir(tmp_path) == ["c.ckpt"]


class Ledger(FolderCheckpointIO):
    """Ends a save as the base does, with a marker that names the files."""

    marker = "index.ckpt"

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        with self.new_folder(path) as folder:
            (folder / "sub").mkdir()
            for name, text in checkpoint.items():
                (folder / "sub" / name).write_text(text)
            names = self.gather_results(sorted(checkpoint), None, path)
            self.finish_save(folder, path, lambda: {"lines": [checkpoint[name].upper() for name in names[0]]},
                             folders=[folder / "sub"])  # fmt: skip

    def open_checkpoint(self, path):
        return TorchCheckpointIO().load_checkpoint(path / self.marker)


def test_the_end_of_a_save_writes_the_marker_and_puts_the_folder_in_its_place(tmp_path):
    io, path = Ledger(), tmp_path / "c.ckpt"
    io.save_checkpoint({"b": "two", "a": "one"}, path)
    assert io.load_checkpoint(path) == {"lines": ["ONE", "TWO"]}
    assert io.exists(path) and (path / "sub" / "a").read_text() == "one"
    assert os.listdir(tmp_path) == ["c.ckpt"]


def test_an_error_at_the_end_of_a_save_leaves_what_was_there(tmp_path):
    io, path = Ledger(), tmp_path / "c.ckpt"
    io.save_checkpoint({"a": "one"}, path)
    io.describe_failure = lambda error: f"no text, {type(error).__name__}"
    said = r"could not be saved \(rank 0: no text, AttributeError\)"
    with unittest.mock.patch.object(Path, "write_text"), pytest.raises(CheckpointError, match=said):
        io.save_checkpoint({"a": 1}, path)
    assert io.load_checkpoint(path) == {"lines": ["ONE"]}
    assert os.listdir(tmp_path) == ["c.ckpt"]


def test_what_one_rank_has_met_is_raised_with_its_number(tmp_path):
    io = Ledger()
    assert io.gather_results({"of": "rank 0"}, None, tmp_path) == [{"of": "rank 0"}]
    with pytest.raises(CheckpointError, match=r"could not be saved \(rank 0: OSError: no room\)"):
        io.gather_results(None, io.describe_failure(OSError("no room")), tmp_path)


def test_nothing_else_is_replaced_removed_or_listed(tmp_path):
    io = Shelf()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="holds something else"):
        io.save_checkpoint({}, tmp_path / "mine")
    with pytest.raises(CheckpointError, match="no shelf can be saved there"):
        io.save_checkpoint({}, tmp_path / "file")
    with pytest.raises(CheckpointError, match="is no shelf: not removed"):
        io.remove_checkpoint(tmp_path / "mine")
    assert io.list_checkpoints(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == ["file", "mine"]


def test_a_second_name_outlives_the_first(tmp_path):
    io, path, other = Shelf(), tmp_path / "c.ckpt", tmp_path / "last.ckpt"
    assert not io.link_checkpoint(path, other)
    io.save_checkpoint({"a": "1"}, path)
    (path / "inner").mkdir()
    (path / "inner" / "b").write_text("2")
    for _ in range(2):
        assert io.link_checkpoint(path, other)
    io.remove_checkpoint(path)
    assert sorted(os.listdir(other)) == ["a", "done", "inner"]
    assert (other / "inner" / "b").read_text() == "2"
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("place", ["meta", torch.device("meta"), {"cpu": "meta"}, lambda storage, where: None, None])
def test_a_load_puts_tensors_where_torch_would(tmp_path, place):
    base = torch.arange(6.0).view(2, 3)
    saved = {"base": base, "column": base[:, 1], "again": base}
    torch.save(saved, tmp_path / "x.pt")
    mine, torchs = apply_map_location(saved, place), torch.load(tmp_path / "x.pt", map_location=place)
    for name, tensor in torchs.items():
        assert (mine[name].device, mine[name].stride()) == (tensor.device, tensor.stride())
        assert mine[name].untyped_storage()._cdata == mine["base"].untyped_storage()._cdata
        assert tensor.is_meta or torch.equal(mine[name], tensor)


def test_load_during_replacement(tmp_path):
    """A load that meets a new folder reads that one."""
    path = tmp_path / "c.ckpt"

    class Late:
        shape, dtype = (), torch.float32

        def __init__(self, text):
            self.text = text

        def read(self):
            if self.text == "old":
                Shelf().save_checkpoint({"a": "new"}, path)
                raise CheckpointError("what was opened is gone")
            return torch.tensor(1.0)

    class Slow(Shelf):
        def open_checkpoint(self, path):
            return {name: Late(text) for name, text in super().open_checkpoint(path).items()}

    Slow().save_checkpoint({"a": "old"}, path)
    assert Slow().load_checkpoint(path) == {"a": torch.tensor(1.0)}
    with pytest.raises(TypeError, match="map_location"):
        Slow().load_checkpoint(path, map_location=3)


# -- kills -------------------------------------------------------------------------------------------------------------


def killed_after(steps, function):
    """Run ``function`` in a fork that is killed when it has renamed so often; where nothing exchanges in one step."""
    pid = os.fork()
    if not pid:
        folders._exchanged = lambda source, target: False
        rename, left = Path.rename, [steps]

        def count(path, target):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return rename(path, target)

        Path.rename = count
        function()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("look", ["list", "exists", "save"])
@pytest.mark.parametrize(("steps", "found"), [(0, "1"), (1, "1"), (2, "2"), (3, "2")])
def test_a_kill_between_two_renames_costs_nothing(tmp_path, steps, found, look):
    """On systems that can't exchange two folders in one step."""
    io, path = Shelf(), tmp_path / "c.ckpt"
    io.save_checkpoint({"a": "1"}, path)
    killed_after(steps, lambda: io.save_checkpoint({"a": "2"}, path))
    if look == "list":
        assert io.list_checkpoints(tmp_path) == [str(path)]
    elif look == "exists":
        assert io.exists(path)
    else:
        io.save_checkpoint({"b": "3"}, tmp_path / "d.ckpt")
        assert sorted(os.listdir(tmp_path)) == ["c.ckpt", "d.ckpt"]
    assert io.load_checkpoint(path) == {"a": found}
    io.save_checkpoint({"a": "4"}, path)
    assert io.load_checkpoint(path) == {"a": "4"}
    assert set(os.listdir(tmp_path)) <= {"c.ckpt", "d.ckpt"}


@pytest.fixture
def half_exchanged(tmp_path):
    """A save by a process that lives, which has moved the old checkpoint aside: its folder, and its target."""
    io, path = Shelf(), tmp_path / "c.ckpt"
    io.save_checkpoint({"a": "1"}, path)
    own = tmp_path / temp_files.new_temporary_name()
    io.save_checkpoint({"a": "2"}, tmp_path / "new.ckpt")
    (tmp_path / "new.ckpt").rename(own)
    path.rename(f"{own}{temp_files.ASIDE}")
    Path(f"{own}{temp_files.NOTE}").write_text("c.ckpt")
    return own, path


def test_running_exchange_is_awaited(half_exchanged):
    """An exchange of folders that is under way is left alone."""
    own, path = half_exchanged

    def finish():
        own.rename(path)
        Path(f"{own}{temp_files.ASIDE}").rename(own)
        Path(f"{own}{temp_files.NOTE}").unlink()

    later = threading.Timer(0.3, finish)
    later.start()
    assert Shelf().exists(path)
    later.join()
    assert Shelf().load_checkpoint(path) == {"a": "2"}


def test_abandoned_exchange_is_undone(half_exchanged, monkeypatch):
    """As by a container that is started again, under another name or with the same process number."""
    own, path = half_exchanged
    monkeypatch.setattr(folders, "EXCHANGE_S", 0.2)
    assert Shelf().list_checkpoints(path.parent) == [str(path)]
    assert Shelf().load_checkpoint(path) == {"a": "1"}
    with pytest.raises(OSError):  # if it only stood still
        own.rename(path)


def test_exchange_of_other_name_ignored(half_exchanged, monkeypatch):
    """The exchange of a checkpoint of another name is not waited for."""
    _, path = half_exchanged

    def stays(note):
        raise AssertionError(f"waited for {note}")

    monkeypatch.setattr(folders, "_stays", stays)
    assert not Shelf().exists(path.with_name("other.ckpt"))


def test_paused_save_after_exchange_succeeds(tmp_path, monkeypatch):
    """Whoever took it for dead has put the old one where it was to be."""
    io, path, own = Shelf(), tmp_path / "c.ckpt", tmp_path / temp_files.new_temporary_name()
    io.save_checkpoint({"a": "1"}, path)
    io.save_checkpoint({"a": "2"}, tmp_path / "new.ckpt")
    (tmp_path / "new.ckpt").rename(own)
    rename, calls = Path.rename, []

    def late(source, target):
        calls.append(source)
        if len(calls) == 3:
            folders._undo(Path(f"{own}{temp_files.NOTE}"))
        return rename(source, target)

    monkeypatch.setattr(folders, "_exchanged", lambda source, target: False)
    monkeypatch.setattr(Path, "rename", late)
    swap_directories(own, path)
    assert io.load_checkpoint(path) == {"a": "2"} and io.load_checkpoint(own) == {"a": "1"}


@pytest.mark.parametrize("text", ["../outside", "/etc/passwd", "", ".."])
def test_a_note_names_nothing_outside_its_folder(tmp_path, text):
    folder = tmp_path / "runs"
    folder.mkdir()
    abandoned = folder / f".torchhal-tmp-{'0' * 8}-1-{1:08x}"
    Path(f"{abandoned}{temp_files.ASIDE}").mkdir()
    note = Path(f"{abandoned}{temp_files.NOTE}")
    note.write_text(text)
    os.utime(note, (1, 1))
    Shelf().list_checkpoints(folder)
    assert os.listdir(tmp_path) == ["runs"]


@pytest.mark.parametrize(("hours", "swept"), [(25, True), (23, False)])
@pytest.mark.parametrize("machine", ["0" * 8, None])
def test_foreign_leftovers_removed_after_a_day(tmp_path, machine, hours, swept):
    """So does that of a process of this machine whose number another one has by now."""
    left = tmp_path / f".torchhal-tmp-{machine or temp_files.machine()}-{os.getpid()}-{1:08x}"
    (left / "inner").mkdir(parents=True)
    (left / "inner" / "part").write_text("x")
    then = time.time() - hours * 3600
    for path in (left / "inner" / "part", left / "inner", left):
        os.utime(path, (then, then))
    Shelf().save_checkpoint({"a": "1"}, tmp_path / "c.ckpt")
    assert left.exists() is not swept


def test_growing_leftover_is_kept(tmp_path):
    """A leftover folder with one file that is written to is kept."""
    left = tmp_path / f".torchhal-tmp-{'0' * 8}-1-{1:08x}"
    left.mkdir()
    (left / "part").write_text("still growing")
    os.utime(left, (1, 1))
    Shelf().save_checkpoint({"a": "1"}, tmp_path / "c.ckpt")
    assert left.exists()
