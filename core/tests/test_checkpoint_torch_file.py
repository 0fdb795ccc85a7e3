"""TorchCheckpointIO gives back what it was given, from every kind of path, and says what it can't do."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import hardware
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn),
]


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure, dtype, shape and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.layout, a.requires_grad) != (b.dtype, b.shape, b.layout, b.requires_grad):
            return False
        a, b = (x.detach().to_dense().resolve_conj().contiguous() for x in (a, b))
        return a.numel() == 0 or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def everything() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "dtypes": {str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in DTYPES},
        "shapes": [torch.tensor(3.5), torch.empty(0), torch.empty(2, 0, 3), torch.arange(24.0).view(2, 3, 4).mT],
        "strided": torch.arange(100.0)[::3],
        "expanded": torch.ones(1).expand(4, 5),
        "special": [torch.eye(3).to_sparse(), torch.tensor([1 + 2j]).conj(), torch.tensor([float("nan"), -0.0])],
        "parameter": nn.Parameter(torch.ones(2)),
        "plain": [
            None,
            True,
            2**1000,
            -(2**1000),
            1.5,
            float("inf"),
            2 - 3j,
            "ü\ud800",
            b"\0\xff",
            bytearray(b"x"),
            {1},
        ],
        "containers": {1: (), (2, "x"): [[]], None: {}, "o": OrderedDict(b=1, a=2), "c": Counter("aab")},
        "torch": [torch.Size([1, 2]), torch.float32, torch.device("cpu")],
        "rng": torch.get_rng_state(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }


@pytest.fixture
def io_() -> TorchCheckpointIO:
    return TorchCheckpointIO()


def test_what_is_saved_comes_back(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    checkpoint = everything()
    io_.save_checkpoint(checkpoint, tmp_path / "x.ckpt")
    loaded = io_.load_checkpoint(tmp_path / "x.ckpt")
    assert same(loaded, checkpoint)
    assert loaded["model"]._metadata == checkpoint["model"]._metadata


def test_plain_torch_reads_it_in_another_process(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    io_.save_checkpoint({"w": torch.arange(5)}, tmp_path / "x.ckpt")
    code = "import sys, torch; print(torch.load(sys.argv[1], weights_only=True)['w'].sum().item())"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x.ckpt"], check=True, capture_output=True, text=True)
    assert done.stdout == "10\n"


def test_reads_what_plain_torch_wrote(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5)}, tmp_path / "x.pt")
    assert same(io_.load_checkpoint(tmp_path / "x.pt"), {"w": torch.arange(5)})
    assert io_.exists(tmp_path / "x.pt")


def test_the_input_stays_as_it_is(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    base = torch.arange(1_000_000.0)
    checkpoint: dict[str, Any] = {"view": base[5:7], "inner": {"list": [nn.Parameter(base[8:9])]}}
    kept = (checkpoint["view"], checkpoint["inner"], checkpoint["inner"]["list"][0])
    io_.save_checkpoint(checkpoint, tmp_path / "x")
    assert list(checkpoint) == ["view", "inner"]
    assert checkpoint["view"] is kept[0]
    assert checkpoint["inner"]["list"][0] is kept[2]
    assert kept[0].data_ptr() == base[5:].data_ptr()
    assert kept[0].untyped_storage().nbytes() == 4_000_000


def test_tied_tensors_stay_tied(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    w, shared = nn.Parameter(torch.ones(2, 3)), [1]
    checkpoint = {"a": w, "b": w, "row": w.detach()[0], "list": shared, "again": shared}
    io_.save_checkpoint(checkpoint, tmp_path / "x")
    loaded = io_.load_checkpoint(tmp_path / "x")
    assert loaded["a"] is loaded["b"]
    assert loaded["list"] is loaded["again"]
    loaded["row"].fill_(7)
    assert loaded["a"][0].tolist() == [7, 7, 7]


# -- views ----------------------------------------------------------------------------------------------------


def test_a_small_view_doesnt_bring_its_base(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    base = torch.arange(1_000_000.0)
    checkpoint = {
        "slice": base[1001:1010],
        "overlapping": base[1005:1015],
        "empty": base[:0],
        "elsewhere": nn.Parameter(base[500_000:500_003]),
    }
    io_.save_checkpoint(checkpoint, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 10_000
    loaded = io_.load_checkpoint(tmp_path / "x")
    assert same(loaded, checkpoint)
    loaded["slice"][-1] = -1
    assert loaded["overlapping"][4] == -1


def test_a_column_doesnt_bring_its_matrix(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    checkpoint = {"column": torch.randn(1000, 1000)[:, 7]}
    io_.save_checkpoint(checkpoint, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 10_000
    assert same(io_.load_checkpoint(tmp_path / "x"), checkpoint)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("other", ["tensor", "storage", "attribute"])
def test_view_keeps_saved_base(io_: TorchCheckpointIO, tmp_path: Path, other: str) -> None:
    """A view keeps its base where that is saved too."""
    base = torch.zeros(10_000, dtype=torch.uint8)
    checkpoint: dict[str, Any] = {"view": base[5:7]}
    if other == "attribute":
        checkpoint["holder"] = torch.ones(1)
        checkpoint["holder"].base = base
    else:
        checkpoint["base"] = base if other == "tensor" else base.untyped_storage()
    io_.save_checkpoint(checkpoint, tmp_path / "x")
    loaded = io_.load_checkpoint(tmp_path / "x")
    holder = loaded["holder"].base if other == "attribute" else loaded["base"]
    data = holder if other == "storage" else holder.untyped_storage()
    assert loaded["view"].untyped_storage().data_ptr() == data.data_ptr()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 4999), st.integers(0, 2000), st.integers(1, 9)), min_size=1, max_size=6))
def test_views_share_memory_after_load(cuts: list[tuple[int, int, int]]) -> None:
    """Views of one memory overlap after a load as before."""
    base = torch.zeros(5000)
    views = [base[start : start + length][::step] for start, length, step in cuts]
    path = "memory://views/x"
    TorchCheckpointIO().save_checkpoint({"views": views}, path)
    loaded = TorchCheckpointIO().load_checkpoint(path)["views"]
    for number, (before, after) in enumerate(zip(views, loaded, strict=True), 1):
        before += number
        after += number
    assert all(torch.equal(a, b) for a, b in zip(views, loaded, strict=True))


# -- where to ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device", ["cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, location: storage, None]
)
def test_map_location_takes_what_torch_takes(io_: TorchCheckpointIO, tmp_path: Path, device: Any) -> None:
    io_.save_checkpoint({"w": torch.ones(2)}, tmp_path / "x")
    assert io_.load_checkpoint(tmp_path / "x", map_location=device)["w"].device.type == "cpu"


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), {"cpu": "meta"}])
def test_map_location_is_not_ignored(io_: TorchCheckpointIO, tmp_path: Path, device: Any) -> None:
    io_.save_checkpoint({"w": torch.ones(2)}, tmp_path / "x")
    assert io_.load_checkpoint(tmp_path / "x", map_location=device)["w"].device.type == "meta"


@pytest.mark.usefixtures("accelerator")
def test_map_location_of_device_tensors(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    """Also in a process that has never heard of the device; and what shared memory shares it again."""
    device = hardware.device()
    whole = torch.arange(6.0, device=device)
    model = nn.Linear(2, 2).to(device)
    saved = {"whole": whole, "part": whole[2:4], "turned": whole.view(2, 3).t(), "state": model.state_dict()}
    io_.save_checkpoint(saved, tmp_path / "x")
    for where, expected in ((None, device), ("cpu", torch.device("cpu")), (device, device)):
        loaded = io_.load_checkpoint(tmp_path / "x", map_location=where)
        for name in ("whole", "part", "turned"):
            assert loaded[name].device == expected and torch.equal(loaded[name].cpu(), saved[name].cpu()), name
        loaded["whole"] += 1
        assert loaded["part"].tolist() == [3.0, 4.0]
        model.load_state_dict(loaded["state"])
    code = (
        "import sys, torch; from torchhal.checkpoint import TorchCheckpointIO\n"
        f"loaded = TorchCheckpointIO().load_checkpoint({str(tmp_path / 'x')!r})\n"
        "assert 'torchhal_simulator' not in sys.modules and loaded['part'].tolist() == [2.0, 3.0]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_wrong_map_location_is_named(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    io_.save_checkpoint({"w": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(TypeError, match=r"'map_location' must be .* \(got 3\.5\)"):
        io_.load_checkpoint(tmp_path / "x", map_location=3.5)
    with pytest.raises(CheckpointError, match="nowhere"):
        io_.load_checkpoint(tmp_path / "x", map_location="nowhere")


# -- what a weights_only load refuses -----------------------------------------------------------------------------


class Foo:
    def __init__(self, y: Any = 1) -> None:
        self.y = y


class Poison:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("poison")


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Foo(), "Foo"),
        (Foo, "Foo"),
        (defaultdict(list), "collections.defaultdict"),
        (frozenset({1}), "builtins.frozenset"),
        (Path("x"), "pathlib"),
        (b"", "bytes"),
        (2**3000, "3001 bits"),
        (Poison(), "ZeroDivisionError: poison"),
        (threading.Lock(), "can't be pickled"),
        (lambda: 1, "can't be pickled"),
    ],
)
def test_a_value_that_couldnt_be_loaded_isnt_saved(
    io_: TorchCheckpointIO, tmp_path: Path, value: Any, said: str
) -> None:
    checkpoint = {"callbacks": {"X": [1, {"y": value}]}}
    with pytest.raises(CheckpointError) as caught:
        io_.save_checkpoint(checkpoint, tmp_path / "x")
    assert "checkpoint['callbacks']['X'][1]['y'] holds" in str(caught.value)
    assert said in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["key", "attribute", "set", "tensor"])
def test_a_value_is_found_wherever_it_hides(io_: TorchCheckpointIO, tmp_path: Path, place: str) -> None:
    tensor = torch.ones(1)
    tensor.note = Foo()  # type: ignore[attr-defined]
    checkpoints: dict[str, dict[str, Any]] = {
        "key": {"x": {Foo(): 1}},
        "attribute": {"x": OrderedDict()},
        "set": {"x": {Foo()}},
        "tensor": {"x": [tensor]},
    }
    checkpoint = checkpoints[place]
    if place == "attribute":
        checkpoint["x"]._metadata = {"v": Foo()}
    with pytest.raises(CheckpointError, match=r"checkpoint\['x'\].* holds .*Foo"):
        io_.save_checkpoint(checkpoint, tmp_path / "x")


def test_an_allowed_class_is_saved_and_loaded(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Foo]):
        io_.save_checkpoint({"x": Foo(torch.ones(3))}, tmp_path / "x")
        assert io_.load_checkpoint(tmp_path / "x")["x"].y.sum() == 3
    with pytest.raises(CheckpointError, match=r"Foo.*add_safe_globals"):
        io_.load_checkpoint(tmp_path / "x")
    assert io_.load_checkpoint(tmp_path / "x", weights_only=False)["x"].y.sum() == 3


def test_allowed_but_unloadable_dict_refused(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    """An allowed dict class that weights_only can't fill is refused at the save."""
    checkpoint = {"x": defaultdict(list, a=[1])}
    with torch.serialization.safe_globals([defaultdict, list]):
        try:
            io_.save_checkpoint(checkpoint, tmp_path / "x")
        except CheckpointError as error:
            assert "checkpoint['x'] holds a collections.defaultdict" in str(error)
        else:  # older versions of torch do fill it
            assert io_.load_checkpoint(tmp_path / "x") == checkpoint


def test_a_malicious_file_runs_nothing(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    torch.save({"x": Canary(tmp_path / "canary")}, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"mkdir.*weights_only=False only for a file whose origin you trust"):
        io_.load_checkpoint(tmp_path / "x")
    assert not (tmp_path / "canary").exists()
    io_.load_checkpoint(tmp_path / "x", weights_only=False)
    assert (tmp_path / "canary").exists(), "the canary must be able to sing"


@pytest.mark.parametrize("value", [[1], None, nn.Linear(1, 1), "x"])
def test_only_a_dict_is_a_checkpoint(io_: TorchCheckpointIO, tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="'checkpoint' must be a dict"):
        io_.save_checkpoint(value, tmp_path / "x")
    torch.save([1], tmp_path / "list")
    with pytest.raises(CheckpointError, match=r"must hold a dict .*got list"):
        io_.load_checkpoint(tmp_path / "list")


# -- paths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("plain.ckpt", "with blank .ckpt", "ünïcødé-模型.ckpt", "50%20.ckpt", ".hidden", ".tmp", "a.b", "[x]*?.ckpt"),
        *("-x", "made/on/the/way.ckpt", "x" * 255, "x.safetensors", "~", "C:x", "./a/../b.ckpt"),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_every_name_is_a_name(
    io_: TorchCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for path in (kind(name), kind(tmp_path / name)):
        io_.save_checkpoint({"a": str(path)}, path)
        assert io_.load_checkpoint(path) == {"a": str(path)}
        assert io_.exists(path)
        listed = io_.list_checkpoints(os.path.dirname(path) or ".")
        assert len(listed) == 1 and os.path.samefile(listed[0], path)
        io_.remove_checkpoint(path)
        assert not io_.exists(path)
        assert not [file for file in tmp_path.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        (b"x", TypeError, "'path' must be a str or os.PathLike"),
        (3, TypeError, "'path' must be a str or os.PathLike"),
        ("", ValueError, "'path' must name a file"),
        ("folder/", ValueError, "'path' must name a file"),
        ("a\0b", ValueError, "'path' must name a file"),
        (Path("memory://x/y"), ValueError, "pathlib makes one slash of two"),
    ],
)
def test_what_is_no_path_is_refused(
    io_: TorchCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, error: type, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: io_.save_checkpoint({}, path), lambda: io_.load_checkpoint(path), lambda: io_.exists(path)):
        with pytest.raises(error, match=said):
            call()
    assert os.listdir(tmp_path) == []


def test_missing_and_folders(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    for missing in ("missing", "file/below", "no/folder"):
        with pytest.raises(FileNotFoundError, match=missing):
            io_.load_checkpoint(tmp_path / missing)
        assert not io_.exists(tmp_path / missing)
        io_.remove_checkpoint(tmp_path / missing)
    for call in (lambda p: io_.save_checkpoint({}, p), io_.load_checkpoint, io_.remove_checkpoint):
        with pytest.raises(CheckpointError, match=r"folder' is a folder"):
            call(tmp_path / "folder")
    with pytest.raises(CheckpointError, match=r"below' could not be saved \((NotADirectory|FileExists)Error"):
        io_.save_checkpoint({}, tmp_path / "file/below")
    with pytest.raises(CheckpointError, match="no regular file"):
        io_.load_checkpoint(tmp_path / "pipe")
    assert not io_.exists(tmp_path / "pipe") and not io_.exists(tmp_path / "folder")
    assert io_.list_checkpoints(tmp_path) == io_.list_checkpoints(tmp_path / "missing") == []
    with pytest.raises(NotADirectoryError):
        io_.list_checkpoints(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "pipe"]


def test_links_are_never_followed_out(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    io_.save_checkpoint({"a": 1}, tmp_path / "target")
    link = tmp_path / "runs/last"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "target")
    assert io_.exists(link) and io_.load_checkpoint(link) == {"a": 1}
    io_.remove_checkpoint(link)
    assert not link.is_symlink() and io_.exists(tmp_path / "target")
    link.symlink_to(tmp_path / "target")
    io_.save_checkpoint({"a": 2}, link)
    assert not link.is_symlink() and io_.load_checkpoint(tmp_path / "target") == {"a": 1}
    (tmp_path / "runs/dangling").symlink_to("nothing")
    assert not io_.exists(tmp_path / "runs/dangling")
    (tmp_path / "runs/folder").symlink_to(tmp_path)
    io_.remove_checkpoint(tmp_path / "runs/folder")
    assert sorted(os.listdir(tmp_path)) == ["runs", "target"]


def test_listing_is_in_the_order_of_saving(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "foreign")
    os.utime(tmp_path / "foreign", (1, 1))
    names = ["c", "a", "d", "b"]
    for name in names:
        io_.save_checkpoint({}, tmp_path / name)
    for name in names:
        os.utime(tmp_path / name, (7, 7))  # as a copy of the folder might
    (tmp_path / "notes.txt").write_text("PK")
    (tmp_path / "cut").write_bytes((tmp_path / "a").read_bytes()[:-1])
    (tmp_path / "folder").mkdir()
    assert io_.list_checkpoints(str(tmp_path)) == [str(tmp_path / name) for name in ["foreign", *names]]
    io_.save_checkpoint({}, tmp_path / "c")
    assert io_.list_checkpoints(tmp_path)[-1] == str(tmp_path / "c")


# -- URLs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_urls(io_: TorchCheckpointIO, tmp_path: Path, protocol: str) -> None:
    folder = f"{protocol}://{tmp_path}/run [1]/50%20 ü"
    for value, name in enumerate(["b.ckpt", "a.ckpt", "b.ckpt"]):
        io_.save_checkpoint({"w": torch.full((300_000,), value)}, f"{folder}/{name}")
    assert io_.load_checkpoint(f"{folder}/b.ckpt")["w"].unique().tolist() == [2]
    assert io_.list_checkpoints(folder) == [f"{folder}/a.ckpt", f"{folder}/b.ckpt"]
    assert io_.list_checkpoints(folder + "/") == io_.list_checkpoints(folder)
    assert io_.exists(f"{folder}/a.ckpt") and not io_.exists(f"{folder}/c.ckpt") and not io_.exists(folder)
    io_.remove_checkpoint(f"{folder}/a.ckpt")
    io_.remove_checkpoint(f"{folder}/a.ckpt")
    assert io_.list_checkpoints(folder) == [f"{folder}/b.ckpt"]
    assert io_.list_checkpoints(f"{folder}/nothing") == []
    with pytest.raises(FileNotFoundError, match=r"c\.ckpt"):
        io_.load_checkpoint(f"{folder}/c.ckpt")
    with pytest.raises(CheckpointError, match="folder"):
        io_.load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="folder"):
        io_.remove_checkpoint(folder)


def test_a_damaged_or_hostile_url_is_refused(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    import fsspec

    url = "memory://damaged/x"
    io_.save_checkpoint({"w": torch.zeros(50)}, url)
    data = bytearray(fsspec.filesystem("memory").cat_file("/damaged/x"))
    data[len(data) // 2] ^= 1
    fsspec.filesystem("memory").pipe_file("/damaged/x", bytes(data))
    with pytest.raises(CheckpointCorruptError, match=url):
        io_.load_checkpoint(url)
    buffer = io.BytesIO()
    torch.save({"x": Canary(tmp_path / "canary")}, buffer)
    fsspec.filesystem("memory").pipe_file("/damaged/x", buffer.getvalue())
    with pytest.raises(CheckpointError, match="mkdir"):
        io_.load_checkpoint(url)
    assert os.listdir(tmp_path) == []


def test_failed_save_to_url_keeps_old(io_: TorchCheckpointIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed save to a URL leaves the old checkpoint."""
    import fsspec
    from fsspec.implementations.memory import MemoryFile

    fs = fsspec.filesystem("memory")
    io_.save_checkpoint({"a": 1}, "memory://failing/x")
    write, written = MemoryFile.write, []

    def full(self: Any, data: Any) -> int:
        written.append(len(data))
        if sum(written) > 1000:
            raise OSError(28, "No space left on device")
        return int(write(self, data))

    monkeypatch.setattr(MemoryFile, "write", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        io_.save_checkpoint({"a": torch.ones(1000)}, "memory://failing/x")
    monkeypatch.undo()
    assert fs.ls("/failing", detail=False) == ["/failing/x"]
    assert io_.load_checkpoint("memory://failing/x") == {"a": 1}


@pytest.mark.parametrize("path", ["x.ckpt", "memory://options/x", "file:///tmp/options/x"])
def test_an_unknown_storage_option_is_named(io_: TorchCheckpointIO, path: str) -> None:
    with pytest.raises(TypeError, match=r"'storage_options' .*'anonn'"):
        io_.save_checkpoint({}, path, storage_options={"anonn": True})
    assert not io_.exists(path)


def test_known_storage_options_reach_the_filesystem(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    seen: list[Any] = []
    init = MemoryFileSystem.__init__

    def spy(self: Any, *args: Any, **options: Any) -> None:
        seen.append(options.get("max_paths"))
        init(self, *args, **options)

    spy.__wrapped__ = init  # type: ignore[attr-defined]
    monkeypatch.setattr(MemoryFileSystem, "__init__", spy)
    io_ = TorchCheckpointIO(storage_options={"max_paths": 7, "skip_instance_cache": True})
    io_.save_checkpoint({}, "memory://known/x", storage_options={"max_paths": 8})
    io_.load_checkpoint("memory://known/x")
    assert seen == [8, 7]


# -- the contract ---------------------------------------------------------------------------------------------------


def test_the_default_bodies_serve_a_minimal_subclass(tmp_path: Path) -> None:
    class Minimal(CheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *, storage_options: Any = None) -> None:
            Path(path).write_bytes(pickle.dumps(checkpoint))

        def load_checkpoint(self, path: Any, *, map_location: Any = "cpu", weights_only: bool = True) -> Any:
            return pickle.loads(Path(path).read_bytes())

    io_ = Minimal()
    for index, name in enumerate(["b", "a", "c"]):
        io_.save_checkpoint({}, tmp_path / name)
        os.utime(tmp_path / name, (index, index))
    (tmp_path / "folder").mkdir()
    assert io_.list_checkpoints(tmp_path) == [str(tmp_path / name) for name in "bac"]
    io_.remove_checkpoint(tmp_path / "a")
    assert not io_.exists(tmp_path / "a") and io_.exists(tmp_path / "b")
    assert io_.features == frozenset()
    io_.wait()
    io_.teardown()
    with pytest.raises(TypeError, match="abstract"):
        CheckpointIO()  # type: ignore[abstract]


def test_an_instance_pickles_and_outlives_its_teardown(tmp_path: Path) -> None:
    io_ = pickle.loads(pickle.dumps(TorchCheckpointIO({"a": 1})))
    assert io_.storage_options == {"a": 1}
    io_.teardown()
    io_.teardown()
    io_.save_checkpoint({}, tmp_path / "x")
    assert io_.load_checkpoint(tmp_path / "x") == {}


@pytest.mark.cold_start
def test_importing_it_is_cheap() -> None:
    code = "import sys, torchhal.checkpoint; print([m for m in ('fsspec', 'torch._dynamo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_a_save_draws_no_random_number(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    import random

    before = random.getstate(), torch.get_rng_state()
    io_.save_checkpoint({"x": torch.ones(3)}, tmp_path / "x")
    io_.load_checkpoint(tmp_path / "x")
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_patched_torch_save_is_not_used(
    io_: TorchCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Gaudi's bridge does: its functions copy each tensor by itself, and read with other defaults."""
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("a wrapper was called"))
    weight = torch.arange(4.0)
    io_.save_checkpoint({"encoder": weight, "decoder": weight.view(2, 2)}, tmp_path / "x")
    for loaded in (io_.load_checkpoint(tmp_path / "x"), io_.open_checkpoint(tmp_path / "x")):
        loaded["encoder"].mul_(2)
        assert loaded["decoder"].tolist() == [[0.0, 2.0], [4.0, 6.0]]
