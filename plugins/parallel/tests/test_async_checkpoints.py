"""Saves that go on in a thread: what they hold, when they raise, and that none is lost at the end of a process."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import models
import pytest
import torch
import training
from torch import nn
from world import joined, rank

from torchhal import ModelCheckpoint, Trainer, registry
from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.testing import isolated_registry
from torchhal_parallel.checkpoint._staging import HostMemory, snapshot
from torchhal_parallel.checkpoint.asynchronous import AsyncCheckpointIO
from torchhal_parallel.checkpoint.dcp import DCPCheckpointIO

pytestmark = pytest.mark.timeout(120)


def saved_in(folder):
    """Names in a folder of checkpoints, but for the records of who wrote them."""
    return sorted({*os.listdir(folder)} - {".torchhal"})


class Gated(TorchCheckpointIO):
    """Saves when it may; fails for paths with 'bad' in them."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        assert self.gate.wait(20)
        if "bad" in os.fspath(path):
            raise OSError("the disk is full")
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)


def inner_ios():
    return [TorchCheckpointIO(), DCPCheckpointIO()]


# -- the copy ------------------------------------------------------------------------------------------------


def test_the_copy_is_that_of_then_and_equal():
    base = torch.arange(4096.0)
    state = {
        "row": base[8:24],
        "overlap": base[16:32].view(4, 4).t(),
        "column": torch.arange(10000.0).view(100, 100)[:, 3],
        "expanded": torch.ones(1).expand(4, 5),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2)),
        "model": nn.BatchNorm1d(2).state_dict(),
        "nest": [({"x": base[:4]}, 3), {1, 2}],
        "meta": torch.empty(3, device="meta"),
    }
    state["again"] = state["nest"]
    before = pickle.loads(pickle.dumps({key: value for key, value in state.items() if key != "meta"}))
    copied = snapshot(state)
    base.zero_()
    with torch.no_grad():
        state["parameter"].zero_()
    state["nest"][1].add(4)
    state["model"]["weight"].zero_()
    for key, value in before.items():
        other = copied[key]
        if isinstance(value, torch.Tensor):
            assert type(other) is type(value) and other.requires_grad == value.requires_grad
            assert torch.equal(other.to_dense(), value.to_dense()), key
        elif key not in ("nest", "again"):
            assert list(other) == list(value) and all(torch.equal(other[k], value[k]) for k in value)
    assert copied["nest"][1] == {1, 2} and copied["again"] is copied["nest"]
    assert copied["model"]._metadata == state["model"]._metadata
    assert copied["meta"].is_meta
    copied["row"][8] = -1
    assert copied["overlap"][0, 0] == -1, "they still share memory"
    assert copied["row"].untyped_storage().nbytes() <= 256, "not all of the memory that a view shows a part of"


@pytest.mark.parametrize("inner", inner_ios(), ids=repr)
def test_a_save_holds_the_values_of_its_moment(tmp_path, inner):
    io = AsyncCheckpointIO(inner)
    weight = torch.ones(1000)
    for step in range(3):
        weight.fill_(step)
        io.save_checkpoint({"w": weight, "step": step}, tmp_path / f"{step}.ckpt")
        weight.fill_(-1)
    for step in range(3):
        loaded = io.load_checkpoint(tmp_path / f"{step}.ckpt")
        assert loaded["step"] == step and loaded["w"].unique().tolist() == [step]
    assert len(io.list_checkpoints(tmp_path)) == 3
    io.teardown()


def test_copies_take_the_memory_of_the_last_one():
    memory = HostMemory()
    state = {"a": torch.ones(1000), "b": torch.ones(1000), "c": torch.ones(10)}
    first = snapshot(state, memory)
    state["a"].fill_(2)
    second = snapshot(state, memory)
    addresses = {tensor.data_ptr() for tensor in first.values()}
    assert addresses == {tensor.data_ptr() for tensor in second.values()} and len(addresses) == 3
    assert second["a"].sum() == 2000 and second["b"].sum() == 1000
    third = snapshot({"c": state["c"]}, memory)
    assert third["c"].data_ptr() == second["c"].data_ptr() and sum(map(len, memory._used.values())) == 1


def test_shared_memory_is_shared_after_a_load(tmp_path):
    io = AsyncCheckpointIO()
    tied = torch.ones(3)
    io.save_checkpoint({"a": tied, "b": tied, "c": tied[1:]}, tmp_path / "x.ckpt")
    loaded = io.load_checkpoint(tmp_path / "x.ckpt")
    loaded["a"].zero_()
    assert loaded["b"].sum() == loaded["c"].sum() == 0


# -- when ----------------------------------------------------------------------------------------------------


def test_second_save_waits_for_the_first(tmp_path):
    """A save returns before it is durable and the next waits."""
    inner = Gated()
    io = AsyncCheckpointIO(inner)
    inner.gate.clear()
    io.save_checkpoint({"i": 1}, tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()
    started = time.monotonic()
    threading.Timer(0.3, inner.gate.set).start()
    io.save_checkpoint({"i": 2}, tmp_path / "x.ckpt")
    assert time.monotonic() - started > 0.25, "one is in flight"
    assert io.exists(tmp_path / "x.ckpt")
    assert io.load_checkpoint(tmp_path / "x.ckpt") == {"i": 2}, "the last one wins"
    io.remove_checkpoint(tmp_path / "x.ckpt")
    assert io.list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("ask", ["wait", "teardown", "save_checkpoint", "load_checkpoint"])
def test_an_error_is_raised_once_by_whoever_comes_next(tmp_path, ask, capfd):
    io = AsyncCheckpointIO(Gated())
    io.save_checkpoint({"i": 0}, tmp_path / "good.ckpt")
    io.save_checkpoint({"i": 1}, tmp_path / "bad.ckpt")
    arguments = {
        "save_checkpoint": ({"i": 2}, tmp_path / "next.ckpt"),
        "load_checkpoint": (tmp_path / "good.ckpt",),
    }.get(ask, ())
    assert not io.exists(tmp_path / "bad.ckpt"), "a question is not the place"
    with pytest.raises(CheckpointError, match=r"bad\.ckpt' could not be saved \(OSError: the disk is full\)") as raised:
        getattr(io, ask)(*arguments)
    assert isinstance(raised.value.__cause__, OSError)
    getattr(io, ask)(*arguments)
    io.wait()
    assert io.load_checkpoint(tmp_path / "good.ckpt") == {"i": 0}
    del io
    gc.collect()
    assert capfd.readouterr().err == ""


def test_an_error_that_nobody_asks_for_is_told(tmp_path, capfd):
    io = AsyncCheckpointIO(Gated())
    io.save_checkpoint({"i": 1}, tmp_path / "bad.ckpt")
    io._join()
    del io
    gc.collect()
    assert "torchhal: a checkpoint was lost" in capfd.readouterr().err


def test_what_can_not_be_copied_or_saved(tmp_path):
    io = AsyncCheckpointIO()
    with pytest.raises(CheckpointError, match=r"can't be copied.*lock"):
        io.save_checkpoint({"lock": threading.Lock()}, tmp_path / "x.ckpt")
    io.save_checkpoint({"class": models.Transformer}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="weights_only"):
        io.wait()
    with pytest.raises(TypeError, match="must be a dict"):
        io.save_checkpoint([1], tmp_path / "x.ckpt")
    with pytest.raises(TypeError, match="DCPCheckpointIO"):
        AsyncCheckpointIO("dcp").save_checkpoint({}, tmp_path / "x.ckpt", storage_options={"key": 1})
    assert os.listdir(tmp_path) == []


def test_arguments_features_pickle():
    io = AsyncCheckpointIO(DCPCheckpointIO())
    assert io.features == DCPCheckpointIO.features | {"async"}
    copied = pickle.loads(pickle.dumps(io))
    assert isinstance(copied.inner, DCPCheckpointIO) and copied.features == io.features
    with pytest.raises(ConfigurationError, match="asynchronous"):
        AsyncCheckpointIO(io)
    with pytest.raises(TypeError, match="must be a CheckpointIO"):
        AsyncCheckpointIO(3)
    assert registry.find("checkpoint_io", "async").create().inner.features == TorchCheckpointIO.features
    assert isinstance(registry.find("checkpoint_io", "dcp_async").create().inner, DCPCheckpointIO)
    assert issubclass(AsyncCheckpointIO, CheckpointIO)
    with isolated_registry(), pytest.raises(LookupError, match="torchhal-parallel"):
        registry.find("checkpoint_io", "dcp_async")


def test_pickles_while_a_save_is_in_flight(tmp_path):
    inner = Gated()
    io = AsyncCheckpointIO(TorchCheckpointIO())
    io.inner, kept = inner, io.inner
    inner.gate.clear()
    io.save_checkpoint({"i": 1}, tmp_path / "x.ckpt")
    io.inner = kept
    pickle.loads(pickle.dumps(io)).wait()
    inner.gate.set()
    io.teardown()
    assert (tmp_path / "x.ckpt").exists()


# -- the end of a process ------------------------------------------------------------------------------------

SLOW = """
    import os, sys, time, torch
    from torchhal.checkpoint import TorchCheckpointIO
    from torchhal_parallel.checkpoint.asynchronous import AsyncCheckpointIO

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, *, storage_options=None):
            time.sleep(1)
            if "bad" in path:
                raise OSError("the disk is full")
            super().save_checkpoint(checkpoint, path)
"""


def script(body, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SLOW) + textwrap.dedent(body), *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('the script')"])
def test_the_interpreter_waits_for_the_last_save(tmp_path, end):
    path = tmp_path / "x.ckpt"
    done = script(
        f"io = AsyncCheckpointIO(Slow())\nio.save_checkpoint({{'w': torch.ones(5)}}, sys.argv[1])\nprint('end')\n{end}",
        path,
    )
    assert done.stdout == "end\n", done.stderr
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(end, 1)
    assert TorchCheckpointIO().load_checkpoint(path)["w"].tolist() == [1] * 5


def test_an_error_at_the_end_goes_to_stderr(tmp_path):
    done = script("io = AsyncCheckpointIO(Slow())\nio.save_checkpoint({}, sys.argv[1])", tmp_path / "bad.ckpt")
    assert "torchhal: a checkpoint was lost" in done.stderr and "the disk is full" in done.stderr


@pytest.mark.parametrize("inner", ["torch", "dcp"])
def test_full_disk_keeps_the_old_checkpoint(tmp_path, inner):
    """A full disk in the thread is named and leaves the old one."""
    body = """
    import resource, signal
    from torchhal.errors import CheckpointError
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    io = AsyncCheckpointIO(sys.argv[2])
    io.save_checkpoint({"w": torch.ones(100), "i": 1}, sys.argv[1])
    io.wait()
    for limit in (0, 20_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        io.save_checkpoint({"w": torch.ones(100_000), "i": 2}, sys.argv[1])
        try:
            io.wait()
        except CheckpointError as error:
            print("File too large" in str(error), "x.ckpt" in str(error), os.listdir(os.path.dirname(sys.argv[1])))
    """
    done = script(body, tmp_path / "x.ckpt", inner)
    assert done.stdout == "True True ['x.ckpt']\n" * 2, done.stdout + done.stderr
    loaded = registry.find("checkpoint_io", inner).create().load_checkpoint(tmp_path / "x.ckpt")
    assert loaded["i"] == 1 and loaded["w"].sum() == 100


@pytest.mark.parametrize("inner", ["torch", "dcp"])
def test_killed_save_keeps_the_old_checkpoint(tmp_path, inner):
    """A process that is killed in a save leaves the old one."""
    body = """
    import signal
    io = AsyncCheckpointIO(sys.argv[2])
    io.save_checkpoint({"w": torch.ones(100), "i": 1}, sys.argv[1])
    io.wait()
    os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)  # all is written, nothing is certain
    io.save_checkpoint({"w": torch.ones(100_000), "i": 2}, sys.argv[1])
    io.wait()
    """
    done = script(body, tmp_path / "x.ckpt", inner)
    assert done.returncode == -signal.SIGKILL, done.stderr
    io = registry.find("checkpoint_io", inner).create()
    assert len(os.listdir(tmp_path)) == 2, "what it has left"
    assert io.list_checkpoints(tmp_path) == [str(tmp_path / "x.ckpt")]
    assert io.load_checkpoint(tmp_path / "x.ckpt")["i"] == 1
    io.save_checkpoint({"i": 3}, tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == ["x.ckpt"] and io.load_checkpoint(tmp_path / "x.ckpt") == {"i": 3}


def test_two_processes_end_without_teardown(tmp_path):
    """A sharded save needs all ranks, and their threads, after the scripts have ended."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(write_ending_script(tmp_path))],
        capture_output=True,
        check=False,
        text=True,
        timeout=90,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = DCPCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
    assert sorted(loaded) == ["0", "1"] and loaded["1"].sum() == 1000


def write_ending_script(folder):
    path = folder / "ending.py"
    path.write_text(
        textwrap.dedent("""
            import time, torch, torch.distributed as dist
            from torchhal_parallel.checkpoint.asynchronous import AsyncCheckpointIO
            from torchhal_parallel.checkpoint.dcp import DCPCheckpointIO

            class Slow(DCPCheckpointIO):
                def _write(self, *args):
                    time.sleep(1)
                    super()._write(*args)

            dist.init_process_group("gloo")
            rank = dist.get_rank()
            AsyncCheckpointIO(Slow()).save_checkpoint({str(rank): torch.ones(1000)}, "x.ckpt")
        """)
    )
    return path


# -- several ranks -------------------------------------------------------------------------------------------


def saves_under_collectives(folder):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    with joined() as strategy:
        io = AsyncCheckpointIO("dcp")
        strategy.checkpoint_io = io
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        whole = torch.arange(40000.0).view(200, 200)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        for step in range(3):
            strategy.save_checkpoint({"w": sharded, "step": step}, os.path.join(folder, f"{step}.ckpt"))
            sharded.to_local().zero_()
            for _ in range(30):
                torch.distributed.all_reduce(torch.ones(100))
            sharded = DTensor.from_local(whole.chunk(2)[rank()].clone(), mesh, [Shard(0)])
        strategy.wait_for_checkpoints()
        return io._group._get_backend(torch.device("cpu")).options._timeout == strategy.timeout


@pytest.mark.slow
def test_sharded_saves_go_on_under_collectives_of_training(world2, tmp_path):
    assert world2.run(saves_under_collectives, str(tmp_path), timeout=60) == [True, True]
    for step in range(3):
        loaded = DCPCheckpointIO().load_checkpoint(tmp_path / f"{step}.ckpt")
        assert loaded["step"] == step and torch.equal(loaded["w"], torch.arange(40000.0).view(200, 200))


class Failing(DCPCheckpointIO):
    """Fails on rank 1."""

    def _write(self, *args):
        super()._write(*args)
        if rank() == 1 and "bad" in str(args[0]):
            raise OSError("the disk is full")


def a_rank_fails(folder):
    texts = []
    with joined() as strategy:
        strategy.checkpoint_io = AsyncCheckpointIO(Failing())
        for name in ("bad1", "good1", "bad2", "good2"):
            try:
                strategy.save_checkpoint({"w": torch.ones(3)}, os.path.join(folder, name))
                if name.startswith("good") or name == "bad2":
                    strategy.wait_for_checkpoints()
            except CheckpointError as error:
                texts.append(str(error))
        # one rank can't even copy: nobody starts
        try:
            value = threading.Lock() if rank() == 1 else 1
            strategy.save_checkpoint({"w": value}, os.path.join(folder, "lock"))
        except CheckpointError as error:
            texts.append(str(error))
    return texts


def test_a_rank_that_fails_fails_all(world2, tmp_path):
    first, second = world2.run(a_rank_fails, str(tmp_path), timeout=60)
    assert len(first) == len(second) == 3
    assert all("disk is full" in text for text in (*first[:2], *second[:2]))
    assert "rank 1" in first[0] and "rank 1" in first[2] and "can't be copied" in first[2]
    assert {"good2"} <= set(os.listdir(tmp_path)), "it goes on after errors, with a new group"
    assert "good1" not in os.listdir(tmp_path), "the save that was told of the error did not happen"


class FailingOnRank0(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if "step=10" in path:
            raise OSError("the disk is full")
        super().save_checkpoint(checkpoint, path)


def fit_with(io, folder):
    try:
        training.train("ddp", 2, "Transformer", folder=folder, plugins=[AsyncCheckpointIO(io)])
    except CheckpointError as error:
        return str(error)


def test_save_error_reaches_every_rank(world2, tmp_path):
    """All ranks of a fit hear of an error of rank 0."""
    texts = world2.run(fit_with, FailingOnRank0(), str(tmp_path), timeout=60)
    assert all("disk is full" in text for text in texts)
    assert saved_in(tmp_path) == ["epoch=0-step=5.ckpt"]


@pytest.mark.slow
@pytest.mark.parametrize("alias, io", [("ddp", "async"), ("zero1", "dcp_async"), ("zero3", "dcp_async")])
def test_training_writes_what_a_waiting_run_writes(world2, tmp_path, alias, io):
    world2.run(training.write, alias, 2, "Transformer", str(tmp_path / "a"), io, timeout=100)
    world2.run(training.write, alias, 2, "Transformer", str(tmp_path / "b"), io.replace("dcp_async", "dcp").replace(
        "async", "torch"), timeout=100)  # fmt: skip
    reader = registry.find("checkpoint_io", io).create()
    names = [os.path.basename(path) for path in reader.list_checkpoints(tmp_path / "a")]
    assert names == ["epoch=0-step=5.ckpt", "epoch=0-step=10.ckpt"]
    for name in names:
        a, b = (reader.load_checkpoint(tmp_path / folder / name) for folder in "ab")
        assert list(a["state_dict"]) == list(b["state_dict"])
        for key, value in b["state_dict"].items():
            assert torch.equal(a["state_dict"][key], value)
        for index, entry in b["optimizer_states"][0]["state"].items():
            for key, value in entry.items():
                assert torch.equal(a["optimizer_states"][0]["state"][index][key], value)


# -- a ModelCheckpoint ---------------------------------------------------------------------------------------


def small_fit(folder, io, *, epochs=3, **options):
    from torchhal.trainer.loggers.base import Logger

    class Heard(Logger):
        name, version = "heard", 0
        seen = []

        def log_metrics(self, metrics, step=None):
            pass

        def after_save_checkpoint(self, callback):
            self.seen.append((os.path.basename(callback.best_model_path), os.path.exists(callback.best_model_path)))

    logger = Heard()
    callback = ModelCheckpoint(folder, "{epoch}", verbose=True, **options)
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, plugins=[io], callbacks=[callback], logger=logger,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = models.ConvNet()
    module.train_dataloader = lambda: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*models.data(models.ConvNet, 2)), 16
    )
    return trainer, module, callback, logger


def test_nothing_is_announced_before_it_is_durable(tmp_path, capsys):
    inner = Gated()
    trainer, module, _, logger = small_fit(tmp_path, AsyncCheckpointIO(inner), save_last=True)
    inner.gate.clear()
    threading.Timer(1.0, inner.gate.set).start()
    trainer.fit(module)
    assert logger.seen == [(f"epoch={epoch}.ckpt", True) for epoch in range(3)]
    assert capsys.readouterr().out.count("saved ") == 3
    assert saved_in(tmp_path) == ["epoch=2.ckpt", "last.ckpt"]
    assert os.path.samefile(tmp_path / "epoch=2.ckpt", tmp_path / "last.ckpt"), "one save, one file"


def test_a_failed_save_is_not_remembered(tmp_path):
    class Fails(Gated):
        def save_checkpoint(self, checkpoint, path, *, storage_options=None):
            super().save_checkpoint(checkpoint, f"{path}-bad" if "epoch=1" in path else path)

    trainer, module, callback, logger = small_fit(tmp_path, AsyncCheckpointIO(Fails()))
    with pytest.raises(CheckpointError, match="disk is full"):
        trainer.fit(module)
    assert callback.best_model_path.endswith("epoch=0.ckpt") and os.path.exists(callback.best_model_path)
    assert logger.seen == [("epoch=0.ckpt", True)]
    assert saved_in(tmp_path) == ["epoch=0.ckpt"]


def test_refused_link_becomes_a_copy(tmp_path, monkeypatch):
    """A link that cannot be made is a copy."""

    def refuse(*args):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    trainer, module, _, _ = small_fit(tmp_path, AsyncCheckpointIO(), epochs=1, save_last=True)
    trainer.fit(module)
    assert (tmp_path / "last.ckpt").read_bytes() == (tmp_path / "epoch=0.ckpt").read_bytes()


@pytest.mark.parametrize("wrap", [lambda io: io, AsyncCheckpointIO], ids=["dcp", "dcp_async"])
@pytest.mark.parametrize("links", [True, False])
def test_last_is_a_second_name_of_a_folder(tmp_path, monkeypatch, wrap, links):
    saves = []

    class Counting(DCPCheckpointIO):
        def save_checkpoint(self, checkpoint, path, *, storage_options=None):
            saves.append(os.path.basename(path))
            super().save_checkpoint(checkpoint, path)

    def refuse(*args):
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    trainer, module, _, _ = small_fit(tmp_path, wrap(Counting()), epochs=2, save_last=True)
    trainer.fit(module)
    assert saves == ["epoch=0.ckpt", "epoch=1.ckpt"], "one save each"
    assert saved_in(tmp_path) == ["epoch=1.ckpt", "last.ckpt"]
    for name in os.listdir(tmp_path / "last.ckpt"):
        assert os.path.samefile(tmp_path / "last.ckpt" / name, tmp_path / "epoch=1.ckpt" / name) == links
    io = DCPCheckpointIO()
    io.remove_checkpoint(tmp_path / "epoch=1.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["epoch"] == 1
    assert not io.link_checkpoint(tmp_path / "epoch=1.ckpt", tmp_path / "x.ckpt")
    assert saved_in(tmp_path) == ["last.ckpt"]


def test_a_signal_ends_the_run_after_its_last_save(tmp_path):
    body = f"""
    sys.path[:0] = {sys.path!r}
    import signal
    import test_async_checkpoints as tests
    from torchhal import Callback

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer, module, callback, _ = tests.small_fit(sys.argv[1], AsyncCheckpointIO(Slow()), epochs=9)
    trainer.callbacks.append(Stop())
    trainer.fit(module)
    """
    done = script(body, tmp_path)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "stopped on SIGTERM at step 3; saved" in done.stderr
    loaded = TorchCheckpointIO().load_checkpoint(TorchCheckpointIO().list_checkpoints(tmp_path)[-1])
    assert loaded["global_step"] == 3
