"""A run that is interrupted and resumed, by the same strategy or another one, ends where the undisturbed one does."""

import os
import pickle
import shutil
from enum import Enum

import models
import pytest
import torch
import training
from parity import TRANSFORMER, check, plain
from tiers import slow
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from torchhal_parallel.checkpoint.dcp import DCPCheckpointIO

pytestmark = pytest.mark.timeout(170)

ALIASES = ["zero1", "zero2", "zero3", "tensor_parallel", "pipeline"]


@pytest.fixture(scope="module")
def written(request, tmp_path_factory):
    """``written(alias, io)``: the folder with the checkpoints of a run, and its results; each run once."""
    runs = {}

    def write(alias, io, size=2):
        if (alias, io, size) not in runs:
            folder = str(tmp_path_factory.mktemp(f"{alias}-{io}-{size}"))
            world = request.getfixturevalue(f"world{size}")
            runs[alias, io, size] = folder, world.run(training.write, alias, size, TRANSFORMER, folder, io, timeout=100)
        return runs[alias, io, size]

    return write


def middle(folder):
    return os.path.join(folder, "epoch=0-step=5.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("io", ["torch", "dcp"])
@pytest.mark.parametrize("alias", ALIASES)
def test_resume_is_exact(world2, written, alias, io):
    folder, undisturbed = written(alias, io)
    results = world2.run(training.resume, alias, 2, TRANSFORMER, middle(folder), io, timeout=100)
    for name, value in undisturbed[0]["state"].items():
        assert torch.equal(results[0]["state"][name], value), name
    for index, entry in undisturbed[0]["optimizer"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(results[0]["optimizer"]["state"][index][key], value), (index, key)
    for before, after in zip(undisturbed, results, strict=True):
        if before["data_leader"]:
            assert after["losses"] == before["losses"][10:]
        assert after["metrics"]["loss_epoch"] == pytest.approx(before["metrics"]["loss_epoch"], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "alias, arguments, io",
    [
        ("zero1", None, "async"),
        ("zero2", None, "dcp"),
        ("zero3", None, "dcp_async"),
        ("hybrid", {"pipeline": 2}, "dcp_async"),
    ],
    ids=str,
)
@pytest.mark.simulator
def test_resume_on_device_memory_is_exact(world2, tmp_path, alias, arguments, io):
    """The copy that a save makes is done when it returns, and nothing that the device does then is in it."""
    pytest.importorskip("torchhal_simulator")
    path = str(tmp_path / "x.ckpt")
    runs = [
        world2.run(training.train_on, "sim", alias, 2, arguments, io, *paths, timeout=100)
        for paths in ((path, None), (None, path))
    ]
    for name, value in runs[0][0]["state"].items():
        assert torch.equal(runs[1][0]["state"][name], value), name
    for before, after in zip(*runs, strict=True):
        if before["data_leader"]:
            assert after["losses"] == before["losses"][10:]


def test_resumes_within_an_accumulation(world2, tmp_path):
    check_within_an_accumulation(world2, tmp_path, "zero2", 2, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"data": 2, "tensor": 2}, {"shard": 2, "tensor": 2}, {"shard": 2, "pipeline": 2}], ids=str
)
def test_mesh_resumes_within_an_accumulation(world4, tmp_path, axes):
    check_within_an_accumulation(world4, tmp_path, "hybrid", 4, axes)


def check_within_an_accumulation(world, folder, alias, devices, axes):
    """Resume in the midst of an accumulation is exact, from one file and from one of shards."""
    ios = {"torch": TorchCheckpointIO(), "dcp": DCPCheckpointIO()}
    undisturbed = world.run(training.write_in_the_midst, alias, devices, axes, str(folder), ios, timeout=100)
    for io in ios:
        path = str(folder / f"{io}.ckpt")
        assert "gradients" in ios[io].open_checkpoint(path)
        results = world.run(training.go_on, alias, devices, axes, path, io, timeout=100)
        assert results[0]["step"] == undisturbed[0]["step"] == 5
        for name, value in undisturbed[0]["state"].items():
            assert torch.equal(results[0]["state"][name], value), (io, name)
        for index, entry in undisturbed[0]["optimizer"]["state"].items():
            for key, value in entry.items():
                assert torch.equal(results[0]["optimizer"]["state"][index][key], value), (io, index, key)
        for before, after in zip(undisturbed, results, strict=True):
            if before["data_leader"]:
                assert after["losses"] == before["losses"][5:]


@pytest.mark.slow
@pytest.mark.parametrize("io", ["torch", "dcp"])
@pytest.mark.parametrize(
    "writer, readers",
    [
        (("zero3", 4), [("ddp", 2), ("zero1", 2), ("tensor_parallel", 4), ("single_device", 1)]),
        (("tensor_parallel", 2), [("zero3", 2), ("single_device", 1)]),
        (("pipeline", 2), [("ddp", 2), ("pipeline", 4)]),
        (("zero1", 2), [("zero2", 4), ("pipeline", 2)]),
        (("ddp", 2), [("zero3", 2), ("pipeline", 2)]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_another_strategy_goes_on(request, written, writer, readers, io):
    """Weights, optimizer and counters are portable; a global batch has the same samples on any number of ranks."""
    folder, _ = written(writer[0], io, writer[1])
    _, state = plain(TRANSFORMER)
    for alias, size in readers:
        if size == 1:
            outcome = [training.resume(alias, 1, TRANSFORMER, middle(folder), io)]
        else:
            world = request.getfixturevalue(f"world{size}")
            outcome = world.run(training.resume, alias, size, TRANSFORMER, middle(folder), io, timeout=100)
        for name, value in state.items():
            torch.testing.assert_close(outcome[0]["state"][name], value, rtol=3e-4, atol=3e-4)


class Versioned(torch.nn.Linear):
    """Its states of version 1 had another name for the weight."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
        if local_metadata.get("version") != 2:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


def save_and_load_a_version(alias, options, io, path):
    from world import joined

    from torchhal import registry

    with joined(registry.find("strategy", alias).create(**options)) as strategy:
        strategy.checkpoint_io = io
        strategy.connect(torch.nn.Sequential(Versioned(4, 4), torch.nn.Linear(4, 2)))
        strategy.setup_model()
        strategy.save_checkpoint({"state_dict": strategy.module_state_dict()}, path)
        strategy.load_module_state_dict(strategy.load_checkpoint(path)["state_dict"])


@pytest.mark.parametrize("io", [TorchCheckpointIO(), DCPCheckpointIO()], ids=repr)
@pytest.mark.parametrize(("alias", "options"), [("zero3", {}), ("hybrid", {"data": 1, "shard": 2})])
def test_the_versions_of_modules_are_kept(world2, tmp_path, io, alias, options):
    world2.run(save_and_load_a_version, alias, options, io, str(tmp_path / "x.ckpt"))


def resume_by_rows(folder):
    """What is said when state of other shapes than the parameters is to be divided; "" by a strategy that need not."""
    import wrong

    from torchhal import Trainer

    said = {}
    for alias, io in (("zero3", "torch"), ("zero3", "dcp"), ("zero1", "torch")):
        path = os.path.join(folder, f"{alias}-{io}.ckpt")
        for ckpt_path in (None, path):
            trainer = Trainer(
                accelerator="cpu", strategy=alias, devices=2, max_steps=1 if ckpt_path is None else 2, logger=False,
                plugins=[io], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            module = wrong.Rows()
            module.train_dataloader = lambda trainer=trainer: training.loader(trainer, models.Transformer, batches=3)
            module.on_train_end = lambda trainer=trainer, path=path: trainer.save_checkpoint(path)
            try:
                trainer.fit(module, ckpt_path=ckpt_path)
                said[alias, io] = ""
            except CheckpointMismatchError as error:
                said[alias, io] = str(error)
    return said


def test_optimizer_state_shapes_are_checked(world2, tmp_path):
    """State of other shapes is refused by the optimizer's name."""
    for said in world2.run(resume_by_rows, str(tmp_path), timeout=100):
        assert said.pop(("zero1", "torch")) == ""
        assert len(said) == 2
        for text in said.values():
            assert "state of ByRows" in text and "'rows' of parameter 0 has the shape (8,)" in text and "zero1" in text


def resume_unfrozen(alias, io, folder):
    """The weights, and which of them are trained, of a run and of one that continues it after a layer was unfrozen."""
    from torchhal import Trainer

    found = []
    for ckpt_path in (None, os.path.join(folder, "x.ckpt")):
        module = models.Transformer()
        module.requires_grad_(False)
        list(module.children())[-1].requires_grad_(True)
        trainer = Trainer(
            accelerator="cpu", strategy=alias, devices=2, max_steps=6, logger=False, plugins=[io],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

        def go_on(*args, module=module, trainer=trainer, path=ckpt_path):
            if trainer.global_step == 2:
                module.requires_grad_(True)
            if trainer.global_step == 4 and path is None:
                trainer.save_checkpoint(os.path.join(folder, "x.ckpt"))

        module.on_train_batch_end = go_on
        trainer.fit(module, training.loader(trainer, models.Transformer, batches=6), ckpt_path=ckpt_path)
        found.append((module.state_dict(), [each.requires_grad for each in module.parameters()]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("alias", "io"), [("zero3", "torch"), ("zero3", "dcp"), ("zero1", "torch")])
def test_what_was_unfrozen_is_trained_on(world2, tmp_path, alias, io):
    for (state, trained), (resumed, trained_then) in world2.run(resume_unfrozen, alias, io, str(tmp_path), timeout=100):
        assert trained == trained_then and all(trained)
        assert all(torch.equal(value, resumed[name]) for name, value in state.items())


def resume_with_memory(alias, io, path):
    """The weights of an unbroken run of four steps, and of one that was resumed after two."""
    import wrong

    from torchhal import Trainer

    found = []
    for steps, ckpt_path in ((4, None), (2, None), (4, path)):
        trainer = Trainer(
            accelerator="cpu", strategy=alias, devices=2, max_steps=steps, logger=False, plugins=[io],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = wrong.WithMemory()
        module.train_dataloader = lambda trainer=trainer: training.loader(trainer, models.Transformer, batches=4)
        if steps == 2:
            module.on_train_end = lambda trainer=trainer: trainer.save_checkpoint(path)
        trainer.fit(module, ckpt_path=ckpt_path)
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    return found[0], found[2]


@pytest.mark.parametrize("io", ["torch", "dcp"])
@pytest.mark.parametrize("alias", ["zero3", slow("tensor_parallel")])
def test_nested_optimizer_state_round_trips(world2, tmp_path, alias, io):
    """State in lists and of one element comes back as it was."""
    for whole, resumed in world2.run(resume_with_memory, alias, io, str(tmp_path / "x.ckpt"), timeout=100):
        for name, value in whole.items():
            assert torch.equal(resumed[name], value), name


def test_the_folder_is_what_it_says(world2, written):
    folder, _ = written("zero3", "dcp")
    path = middle(folder)
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "plain.ckpt"]
    io = DCPCheckpointIO()
    assert [os.path.basename(p) for p in io.list_checkpoints(folder)] == ["epoch=0-step=5.ckpt", "epoch=0-step=10.ckpt"]
    loaded = io.load_checkpoint(path)
    assert list(loaded["state_dict"]) == list(models.Transformer().state_dict())
    assert loaded["global_step"] == 5
    opened = io.open_checkpoint(path)["state_dict"]["embed.weight"]
    assert (tuple(opened.shape), opened.dtype) == ((20, 32), torch.float32)
    assert torch.equal(opened.read(), loaded["state_dict"]["embed.weight"])


@pytest.mark.parametrize("damaged", ["__0_0.distcp", "__1_0.distcp", "plain.ckpt", ".metadata"])
def test_damage_is_refused(written, tmp_path, damaged):
    folder, _ = written("zero3", "dcp")
    path = tmp_path / "copy.ckpt"
    shutil.copytree(middle(folder), path)
    file = path / damaged
    whole = file.read_bytes()
    io = DCPCheckpointIO()
    for position in range(len(whole) // 7, len(whole), max(1, len(whole) // 7)):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        file.write_bytes(flipped)
        try:
            loaded = io.load_checkpoint(path)
        except CheckpointError:
            continue
        file.write_bytes(whole)  # padding between records: nothing that was saved has changed
        intact = io.load_checkpoint(path)
        for name, value in intact["state_dict"].items():
            assert torch.equal(loaded["state_dict"][name], value)
    for harm, says in ((lambda: file.write_bytes(whole[: len(whole) // 2]), ""), (file.unlink, "is missing")):
        harm()
        for look in (io.open_checkpoint, io.load_checkpoint):  # before a run has begun with what is still there
            with pytest.raises(CheckpointCorruptError, match=f"copy\\.ckpt/{damaged}' {says}") as raised:
                look(path)
        assert "copy the whole folder again" in str(raised.value) or damaged == "plain.ckpt"
    assert not io.exists(path) or damaged.startswith("__")


def test_checksums_are_never_passed_by(monkeypatch, tmp_path):
    """As a torch would that slices its files in another way."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from torchhal_parallel.checkpoint._safe_reader import CheckedReader

    io = DCPCheckpointIO()
    io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "x.ckpt")
    monkeypatch.setattr(CheckedReader, "_slice_file", FileSystemReader._slice_file)
    with pytest.raises(CheckpointError, match=r"past their checksums \(__0_0\.distcp:0"):
        io.load_checkpoint(tmp_path / "x.ckpt")


def test_hostile_metadata_is_not_executed(written, tmp_path):
    folder, _ = written("zero3", "dcp")
    path = tmp_path / "copy.ckpt"
    shutil.copytree(middle(folder), path)

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    (path / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointCorruptError):
        DCPCheckpointIO().load_checkpoint(path)
    from torchhal_parallel.checkpoint._safe_reader import CheckedReader

    with pytest.raises(CheckpointCorruptError, match="mkdir"):
        CheckedReader(path, None, None).read_metadata()
    assert not (tmp_path / "executed").exists()


class _ByGetattr(pickle.Pickler):
    """Pickles an Enum's members as Python 3.11.0 to 3.11.3 do, Debian's 3.11.2 among them."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_every_python_is_read(tmp_path):
    from torchhal_parallel.checkpoint._safe_reader import CheckedReader

    DCPCheckpointIO().save_checkpoint({"a": torch.ones(3)}, tmp_path / "x.ckpt")
    file = tmp_path / "x.ckpt" / ".metadata"
    metadata = CheckedReader(file.parent, None, None).read_metadata()
    with file.open("wb") as opened:
        _ByGetattr(opened).dump(metadata)
    assert b"getattr" in file.read_bytes()
    assert CheckedReader(file.parent, None, None).read_metadata() == metadata


@pytest.mark.parametrize("of", [Metadata, _MEM_FORMAT_ENCODING, torch.Size])
def test_metadata_reaches_no_other_attribute(tmp_path, of):
    from torchhal_parallel.checkpoint._safe_reader import CheckedReader

    class Hostile:
        def __reduce__(self):
            return getattr, (of, "__init__")

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointCorruptError, match="reads the attribute '__init__'"):
        CheckedReader(tmp_path, None, None).read_metadata()


def test_nothing_else_is_replaced_or_removed(tmp_path):
    io = DCPCheckpointIO()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="holds something else"):
        io.save_checkpoint({"a": torch.ones(2)}, tmp_path / "mine")
    with pytest.raises(CheckpointError, match="not removed"):
        io.remove_checkpoint(tmp_path / "mine")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        io.save_checkpoint({"a": torch.ones(2)}, tmp_path / "file")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["file", "mine"]


def test_a_save_replaces_and_a_removal_removes(tmp_path):
    io = DCPCheckpointIO()
    path = tmp_path / "new" / "c.ckpt"
    for value in (1.0, 2.0):
        io.save_checkpoint({"a": torch.full((3,), value), "n": [1, {"b": "x"}], 3: torch.ones(())}, path)
        loaded = io.load_checkpoint(path)
        assert loaded["n"] == [1, {"b": "x"}]
        assert loaded["a"].tolist() == [value] * 3
        assert loaded[3].item() == 1
    assert os.listdir(path.parent) == ["c.ckpt"]
    io.remove_checkpoint(path)
    assert os.listdir(path.parent) == []
    io.remove_checkpoint(path)
    with pytest.raises(FileNotFoundError, match=r"c\.ckpt"):
        io.load_checkpoint(path)
    assert io.list_checkpoints(tmp_path / "nowhere") == []


def test_parity_holds_with_checkpoints_on(written):
    _, results = written("zero3", "dcp")
    check(results, TRANSFORMER)
