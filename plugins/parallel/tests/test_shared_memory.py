"""Tensors of a sharded checkpoint that share memory are saved once, and share it after a load."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointCorruptError
from torchhal_parallel.checkpoint.dcp import PLAIN, DCPCheckpointIO


def size_of(folder):
    return sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith(".distcp"))


def content_of(folder):
    return TorchCheckpointIO().load_checkpoint(folder / PLAIN)


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base,
        lambda base: base[3:9],
        lambda base: base[:, 2:],
        lambda base: base.t(),
        lambda base: base[::2, 1::3],
        lambda base: base.view(2, 10, 8),
        lambda base: base[4, 4],
        lambda base: base[:1].expand(5, 8),
        lambda base: torch.nn.Parameter(base[2:4]),
    ],
    ids=["tied", "rows", "columns", "transposed", "steps", "reshaped", "0-d", "expanded", "parameter"],
)
def test_views_share_memory_after_a_load(tmp_path, view):
    base = torch.randn(20, 8)
    state = {"base": base, "nest": [{"view": view(base)}], "other": base.clone()}
    expected = state["nest"][0]["view"].detach().clone()
    io, path = DCPCheckpointIO(), tmp_path / "x.ckpt"
    io.save_checkpoint(state, path)
    loaded = io.load_checkpoint(path)
    part = loaded["nest"][0]["view"]
    assert torch.equal(part, expected) and torch.equal(loaded["base"], base) and torch.equal(loaded["other"], base)
    assert part.untyped_storage().data_ptr() == loaded["base"].untyped_storage().data_ptr()
    assert loaded["other"].untyped_storage().data_ptr() != loaded["base"].untyped_storage().data_ptr()
    assert size_of(path) < 2.5 * base.nbytes + 4000


@pytest.mark.parametrize(
    "views",
    [
        lambda base: (base[:12], base[8:]),
        lambda base: (base[:, :4], base[:, 4:]),
        lambda base: (base, base.view(torch.int32)),
        lambda base: (torch.complex(base, base).conj(), base),
        lambda base: (base[:0], base),
    ],
    ids=["none covers all", "none is contiguous", "other dtype", "conjugate", "empty"],
)
def test_what_has_no_common_tensor_is_saved_apart(tmp_path, views):
    one, two = views(torch.randn(20, 8))
    io, path = DCPCheckpointIO(), tmp_path / "x.ckpt"
    io.save_checkpoint({"one": one, "two": two}, path)
    loaded = io.load_checkpoint(path)
    assert torch.equal(loaded["one"], one.resolve_conj()) and torch.equal(loaded["two"], two)
    assert content_of(path)["format"] == 1


def test_earlier_releases_read_what_has_no_views(tmp_path):
    tied, io = torch.ones(3), DCPCheckpointIO()
    io.save_checkpoint({"a": tied, "b": tied}, tmp_path / "tied.ckpt")
    io.save_checkpoint({"a": tied, "b": tied[1:]}, tmp_path / "views.ckpt")
    assert [content_of(tmp_path / name)["format"] for name in ("tied.ckpt", "views.ckpt")] == [1, 2]


def test_the_users_own_mark_is_kept(tmp_path):
    tensor = torch.arange(4.0)
    state = {"x": tensor, "y": tensor[1:], "__tensor__": {"__tensor__": ["x", [1], [1], 0]}, "z": {"__tensor__": "x"}}
    DCPCheckpointIO().save_checkpoint(state, tmp_path / "x.ckpt")
    loaded = DCPCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
    assert loaded["__tensor__"] == state["__tensor__"] and loaded["z"] == state["z"]
    assert loaded["y"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("place", [([9], [1], 0), ([2], [3], 2), ([2], [-1], 3), ([-2], [1], 0), ([2], [1], -1)])
def test_a_view_beyond_its_memory_is_refused(tmp_path, place):
    tensor, io, path = torch.arange(4.0), DCPCheckpointIO(), tmp_path / "x.ckpt"
    io.save_checkpoint({"x": tensor, "y": tensor[1:]}, path)
    content = content_of(path)
    content["plain"]["y"] = {"__tensor__": ["x", *place]}
    TorchCheckpointIO().save_checkpoint(content, path / PLAIN)
    with pytest.raises(CheckpointCorruptError, match="reaches beyond 'x'"):
        io.load_checkpoint(path)


def _read_view(path):
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=int(os.environ["RANK"]), world_size=2)
    try:
        target = distribute_tensor(torch.zeros(6, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        view = DCPCheckpointIO().open_checkpoint(path)["view"]
        part = view.read(target)
        return tuple(view.shape), part.placements, part.full_tensor(), view.read()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_view_is_read_into_a_sharded_tensor(world2, tmp_path):
    base, path = torch.randn(7, 4), tmp_path / "x.ckpt"
    DCPCheckpointIO().save_checkpoint({"base": base, "view": base[1:]}, path)
    for shape, placements, full, alone in world2.run(_read_view, str(path), timeout=60):
        assert shape == (6, 4) and placements == (Shard(0),)
        assert torch.equal(full, base[1:]) and torch.equal(alone, base[1:])


def _save_unlike(path):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=2)
    try:
        io = DCPCheckpointIO()
        base = torch.arange(8.0)
        io.save_checkpoint({"c": torch.zeros(2)} if rank == 0 else {"c": base, "b": base[1:3], "d": base[4:]}, path)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_view_of_what_another_rank_saves_is_saved_itself(world2, tmp_path):
    path = tmp_path / "x.ckpt"
    world2.run(_save_unlike, str(path), timeout=60)
    loaded = DCPCheckpointIO().load_checkpoint(path)
    assert loaded["c"].tolist() == [0.0, 0.0]
    assert loaded["b"].tolist() == [1.0, 2.0] and loaded["d"].tolist() == [4.0, 5.0, 6.0, 7.0]
