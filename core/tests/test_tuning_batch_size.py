"""find_batch_size: the sizes it finds and refuses, ranks that run out of memory, and what it leaves behind: nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quiet_trainer import make
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from torchhal import DataModule, Module
from torchhal.errors import ConfigurationError
from torchhal.tuning import find_batch_size, search_batch_size

SCRIPT = Path(__file__).parent / "scripts" / "find_batch_size.py"
X = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Net(Module):
    """Has memory for so many samples; what it raises beyond, and where, is the test's."""

    def __init__(self, room=100, batch_size=4, where="forward", ranks=(0, 1, 2)):
        super().__init__()
        self.save_hyperparameters("batch_size")
        torch.manual_seed(0)
        self.body = nn.Linear(4, 1)
        self.room, self.where, self.ranks = room, where, ranks
        self.sizes = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.append(len(x))
        self.use_memory("forward")
        loss = mse_loss(self.body(x), y)
        loss.register_hook(lambda gradient: self.use_memory("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.use_memory("step")

    def use_memory(self, where):
        if self.where == where and self.sizes[-1] > self.room and self.trainer.global_rank in self.ranks:
            torch.empty(2**50, dtype=torch.uint8)  # a pebibyte: what the CPU's allocator says

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class MakesLoader(Net):
    def train_dataloader(self):
        return DataLoader(DATA, self.hparams.batch_size, shuffle=True)


def loader(**options):
    return DataLoader(DATA, **{"batch_size": 4, **options})


# -- the search ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "options", "found", "tried"),
    [
        (100, {}, 64, [2, 4, 8, 16, 32, 64, 128]),
        (100, {"mode": "binary"}, 100, [2, 4, 8, 16, 32, 64, 128, 96, 112, 104, 100, 102, 101]),
        (100, {"mode": "binary", "margin": 0.1}, 90, None),
        (100, {"start": 1000}, 62, [1000, 500, 250, 125, 62]),
        (1, {}, 1, [2, 1]),
        (10**9, {"max_size": 50}, 50, [2, 4, 8, 16, 32, 50]),
        (10**9, {"max_size": 50, "mode": "binary", "margin": 0.5}, 50, None),
        (10**9, {"max_trials": 3}, 8, [2, 4, 8]),
        (10**9, {"limit": lambda: 37}, 37, [2, 4, 8, 16, 32, 37]),
        (10**9, {"limit": lambda: 37, "start": 64}, 37, [64]),
    ],
)
def test_search(room, options, found, tried):
    sizes = []

    def fits(size):
        sizes.append(size)
        return size <= room

    assert search_batch_size(fits, **options) == found
    assert tried is None or sizes == tried


@given(room=st.integers(1, 3000), start=st.integers(1, 500))
@settings(max_examples=80, deadline=None)
def test_binary_search_finds_the_largest(room, start):
    options = {"start": start, "max_trials": 100}
    assert search_batch_size(lambda size: size <= room, mode="binary", **options) == room
    found = search_batch_size(lambda size: size <= room, mode="power", **options)
    assert found <= room < 2 * found + 2


def test_nothing_fits():
    with pytest.raises(ConfigurationError, match="not even the smallest batch size that was tried, 1, fits"):
        search_batch_size(lambda size: False)
    with pytest.raises(ConfigurationError, match="use a smaller model"):
        find_batch_size(make(), Net(room=0), loader())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "binsearch"}, "'mode' must be 'power' or 'binary'"),
        ({"start": 0}, "'start' must be an int of at least 1"),
        ({"steps": 0}, "'steps' must be an int of at least 1"),
        ({"max_size": 2.5}, "'max_size' must be an int of at least 1"),
        ({"max_trials": True}, "'max_trials' must be an int"),
        ({"margin": 1.0}, "'margin' must be from 0 to below 1"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        find_batch_size(make(), Net(), loader(), **arguments)


# -- where the batch size is -----------------------------------------------------------------------------------


def test_of_a_loader(accelerator):
    batches = loader(shuffle=True, generator=torch.Generator().manual_seed(3))
    model = Net()
    before, numbers = batches.generator.get_state(), torch.get_rng_state()
    assert find_batch_size(make(), model, batches) == 64
    assert find_batch_size(make(), model, batches, mode="binary", margin=0.0) == 100
    assert batches.batch_size == batches.batch_sampler.batch_size == 4 and model.sizes == []
    assert torch.equal(batches.generator.get_state(), before) and torch.equal(torch.get_rng_state(), numbers)


def test_of_a_hyperparameter_of_the_model():
    model = MakesLoader()
    assert find_batch_size(make(), model) == 64
    assert model.hparams.batch_size == 4


def test_of_an_attribute_of_a_data_module():
    class Data(DataModule):
        def __init__(self):
            super().__init__()
            self.size = 4

        def train_dataloader(self):
            return DataLoader(DATA, self.size)

    data = Data()
    for where in ({"datamodule": data}, {"train_dataloaders": data}):
        assert find_batch_size(make(), Net(), **where, attribute="size") == 64
    assert data.size == 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_never_more_than_all_samples(drop_last):
    model = Net(room=10**9)
    assert find_batch_size(make(), model, loader(drop_last=drop_last)) == 400
    assert find_batch_size(make(), model, loader(), max_size=300) == 300
    few = RandomSampler(DATA, num_samples=50)
    assert find_batch_size(make(), model, loader(sampler=few, drop_last=drop_last)) == 50


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield X[0], X[0].sum(0, keepdim=True)


def test_of_a_dataset_without_a_length():
    assert find_batch_size(make(), Net(), DataLoader(Endless(), 4)) == 64


class HardCoded(MakesLoader):
    def train_dataloader(self):
        return DataLoader(DATA, 32)


class OwnSampler(BatchSampler): ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_dataloaders": [DATA[:4]]}, "a list is no DataLoader"),
        ({"train_dataloaders": loader(batch_size=None)}, "has batch_size=None, so the dataset makes the batches"),
        (
            {"train_dataloaders": DataLoader(DATA, batch_sampler=OwnSampler(RandomSampler(X), 4, False))},
            "OwnSampler",
        ),
        ({"attribute": "bs"}, "Net has no attribute or hyperparameter 'bs'"),
    ],
)
def test_sizes_that_cannot_be_changed(given, said):
    with pytest.raises(ConfigurationError, match=said):
        find_batch_size(make(), Net(), **given)


def test_a_name_beside_a_loader():
    with pytest.raises(ConfigurationError, match="'attribute' names the batch size of a model"):
        find_batch_size(make(), Net(), DataLoader(DATA, 2), attribute="x")


def test_a_size_that_the_loader_ignores():
    with pytest.raises(ConfigurationError, match=r"HardCoded.train_dataloader\(\) has made batches of 32, while"):
        find_batch_size(make(), HardCoded())


def test_another_error_is_the_models():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("of the model")

    model = Fails()
    with pytest.raises(ZeroDivisionError, match="of the model"):
        find_batch_size(make(), model, loader())


class Counted(Net):
    calls: list[str] = []

    def prepare_data(self):
        self.calls.append(f"model on {self.trainer.global_rank}")


class CountedData(DataModule):
    def __init__(self):
        super().__init__()
        self.batch_size, self.rows = 4, None

    def prepare_data(self):
        Counted.calls.append(f"data on {self.trainer.global_rank}")
        self.rows = DATA  # which one process may rely on

    def setup(self, stage):
        Counted.calls.append("setup")

    def teardown(self, stage):
        Counted.calls.append("teardown")

    def train_dataloader(self):
        return DataLoader(self.rows, self.batch_size)


def test_data_is_prepared_once(monkeypatch):
    monkeypatch.setattr(Counted, "calls", [])
    model, data = Counted(), CountedData()
    assert find_batch_size(make(), model, data) == 64
    assert Counted.calls == ["data on 0", "model on 0", *["setup", "teardown"] * 7]  # 2, 4, ... 128
    assert data.rows is None and "prepare_data" not in vars(data) | vars(model)
    make().fit(model, datamodule=data)
    assert Counted.calls[16:18] == ["data on 0", "model on 0"]


def test_data_that_cannot_be_prepared():
    class Fails(Net):
        def prepare_data(self):
            raise ZeroDivisionError("of the download")

    with pytest.raises(ZeroDivisionError, match="of the download"):
        find_batch_size(make(), Fails(), loader())


def test_a_fit_after_it_is_that_without_it():
    ends = []
    for searched in (False, True):
        trainer, model = make(max_epochs=2), MakesLoader()
        torch.manual_seed(3)
        if searched:
            find_batch_size(trainer, model)
        trainer.fit(model)
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


# -- several processes -----------------------------------------------------------------------------------------


def on_a_rank(where, ranks, room=100, start=64):
    from datetime import timedelta

    from torchhal.strategies import DDPStrategy

    size = int(os.environ["WORLD_SIZE"])
    trainer = make(strategy=DDPStrategy(timeout=timedelta(seconds=20)), devices=size)
    model = Net(room=room, where=where, ranks=ranks)
    try:
        found = find_batch_size(trainer, model, loader(shuffle=True), start=start)
    except ConfigurationError as error:
        found = str(error)
    trainer.fit(Net(), loader())  # they still meet
    return found, trainer.global_step


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize(
    "ranks", [pytest.param((1,), id="one rank"), pytest.param((0, 1, 2), id="every rank", marks=pytest.mark.slow)]
)
def test_ranks_that_run_out_of_memory(world, where, ranks):
    """Whichever of them, and wherever: the others aren't left waiting, and all find the same."""
    size = world.size
    assert world.run(on_a_rank, where, ranks, timeout=90) == [(64, -(-100 // size))] * size


def test_nothing_fits_on_one_rank(world2):
    outcomes = world2.run(on_a_rank, "forward", (0,), 0, 2, timeout=90)
    assert all("not even the smallest batch size" in found for found, _ in outcomes)


def in_a_group_of_its_own():
    import torch.distributed as dist

    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    try:
        find_batch_size(make(strategy="ddp", devices=size), Net(), loader())
    finally:
        dist.destroy_process_group()


def test_a_process_group_of_the_program_is_refused(world2):
    for outcome in world2.outcomes(in_a_group_of_its_own, timeout=60):
        assert outcome.error == "ConfigurationError" and "destroy it before the search" in outcome.message


def preparing(fails):
    class Prepares(Counted):
        def prepare_data(self):
            super().prepare_data()
            if fails:
                raise ZeroDivisionError("of the download")

    found = find_batch_size(make(strategy="ddp", devices=2), Prepares(), loader(), start=64)
    return found, Counted.calls


def test_one_rank_prepares_data(world2):
    assert world2.run(preparing, False, timeout=60) == [(64, ["model on 0"]), (64, [])]
    zero, one = world2.outcomes(preparing, True, timeout=60)
    assert (zero.error, zero.message) == ("ZeroDivisionError", "of the download")
    assert one.error == "RankFailedError"


def failing_on_rank_1():
    class Fails(Net):
        def on_before_optimizer_step(self, optimizer):
            if self.trainer.global_rank == 1:
                raise ZeroDivisionError("of the model")

    find_batch_size(make(strategy="ddp", devices=2), Fails(), loader())


def test_another_error_on_one_rank_is_everybodys(world2):
    zero, one = world2.outcomes(failing_on_rank_1, timeout=60)
    assert (one.error, one.message) == ("ZeroDivisionError", "of the model")
    assert zero.error == "RankFailedError" and "ZeroDivisionError: of the model" in zero.message


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_every_way_to_start_processes(tmp_path, strategy):
    """The processes that a search starts fit afterwards; no failure is printed for what was to be found."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), strategy], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split("\n")) == {"found 100, 64; then 4 steps", ""}
    assert "failed" not in done.stderr and "Traceback" not in done.stderr
