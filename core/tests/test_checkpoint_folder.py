"""Checkpoints that are folders: what is there, what may be replaced, and that one folder takes another's place."""

import os

import pytest
import torch

from torchhal.checkpoint.folder import FolderCheckpointIO, exchange
from torchhal.checkpoint.local import sync_folder
from torchhal.checkpoint.reading import located
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
            exchange(folder, path)

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
    mine, torchs = located(saved, place), torch.load(tmp_path / "x.pt", map_location=place)
    for name, tensor in torchs.items():
        assert (mine[name].device, mine[name].stride()) == (tensor.device, tensor.stride())
        assert mine[name].untyped_storage()._cdata == mine["base"].untyped_storage()._cdata
        assert tensor.is_meta or torch.equal(mine[name], tensor)


def test_a_load_that_meets_a_new_folder_reads_that(tmp_path):
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
