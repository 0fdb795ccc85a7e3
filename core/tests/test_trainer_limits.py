"""How much is run: exact numbers of steps, batches, validations and epochs under every limit."""

import itertools
import time
from datetime import timedelta

import hardware
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.sampler import BatchSampler

from torchhal import Callback, Module, Trainer
from torchhal.errors import ConfigurationError, ModelError
from torchhal.trainer.callbacks import EarlyStopping
from torchhal.trainer.data._loaders import limit_length
from torchhal.trainer.data._samplers import distribute, with_skip
from torchhal.trainer.loggers import Logger

pytestmark = pytest.mark.usefixtures("accelerator")


class Net(Module):
    """Notes what is called: ("train", epoch, batch_idx, the batch's number), ("val", dataloader_idx, ...), ..."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.calls = []

    def training_step(self, batch, batch_idx):
        self.calls.append(("train", self.current_epoch, batch_idx, int(batch.flatten()[0])))
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("sanity" if self.trainer.sanity_checking else "val", dataloader_idx, batch_idx))
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.calls.append(("test", 0, batch_idx))

    def predict_step(self, batch, batch_idx):
        return int(batch.flatten()[0])

    def on_validation_start(self):
        self.calls.append("sanity start" if self.trainer.sanity_checking else "val start")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def count(self, kind):
        return sum(call == kind if isinstance(call, str) else call[0] == kind for call in self.calls)

    def validated_after(self):
        """The number of training batches before each validation."""
        train, found = 0, []
        for call in self.calls:
            train += call[0] == "train"
            if call == "val start":
                found.append(train)
        return found


def batches(count):
    return [torch.full((2, 1), float(index)) for index in range(count)]


class Unsized:
    """A loader that doesn't know its length and can be read again."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(batches(self.count))


def make(*callbacks, **options):
    defaults = {
        "accelerator": hardware.name(), "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(train=4, val=None, *callbacks, model=None, **options):
    model = model or Net()
    trainer = make(*callbacks, **options)
    trainer.fit(
        model,
        batches(train) if isinstance(train, int) else train,
        batches(val) if isinstance(val, int) else val,
    )
    return trainer, model


class StopAt(Callback):
    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batches == self.batch:
            trainer.should_stop = True


# -- epochs and steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({"max_epochs": 3}, 12, 3),
        ({"max_epochs": 0}, 0, 0),
        ({"max_steps": 0}, 0, 0),
        ({"max_steps": 6}, 6, 1),
        ({"max_steps": 8}, 8, 2),
        ({"max_steps": 6, "max_epochs": 1}, 4, 1),
        ({"max_steps": 3, "max_epochs": -1}, 3, 0),
        ({"max_epochs": 2, "min_epochs": 2}, 8, 2),
        ({"max_steps": 3, "min_epochs": 2}, 3, 0),
        ({"max_epochs": 1, "min_steps": 100}, 4, 1),
        ({"max_epochs": 2, "limit_train_batches": 0}, 0, 0),
        ({"max_epochs": 2, "limit_train_batches": 0.0}, 0, 0),
        ({"max_epochs": 2, "limit_train_batches": 1}, 2, 2),
        ({"max_epochs": 2, "limit_train_batches": 1.0}, 8, 2),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 4, 2),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6, 2),
        ({"max_epochs": 2, "limit_train_batches": 99}, 8, 2),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 4, 2),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 2, 2),
        ({"max_epochs": 2, "accumulate_grad_batches": 99}, 2, 2),
        ({"max_epochs": 1, "accumulate_grad_batches": 2, "limit_train_batches": 3}, 2, 1),
        ({"max_steps": 3, "accumulate_grad_batches": 3}, 3, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("loader", [4, Unsized(4)], ids=["sized", "unsized"])
def test_steps_and_epochs(loader, options, steps, epochs):
    if isinstance(loader, Unsized) and options.get("limit_train_batches") == 0.5:
        with pytest.raises(ConfigurationError, match=r"'limit_train_batches' is a share of the batches \(0\.5\)"):
            fit(loader, **options)
        return
    if isinstance(loader, Unsized) and options == {"max_steps": 8}:
        epochs = 1  # nobody knows yet that the epoch has ended
    trainer, model = fit(loader, **options)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)
    if "accumulate_grad_batches" not in options:
        assert model.count("train") == steps


def test_batches_of_an_epoch_are_the_first():
    _, model = fit(5, max_epochs=2, limit_train_batches=2)
    assert [call[1:] for call in model.calls] == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]


@pytest.mark.parametrize(("length", "share", "count"), [(100, 0.57, 57), (100, 0.29, 29), (10, 0.99, 9), (3, 0.34, 1)])
def test_a_share_is_what_it_says(length, share, count):
    trainer, _ = fit(length, max_epochs=1, limit_train_batches=share)
    assert trainer.global_step == count == trainer.num_training_batches


@pytest.mark.parametrize("name", ["limit_train_batches", "limit_val_batches", "overfit_batches"])
def test_a_share_of_no_batch_is_an_error(name):
    with pytest.raises(ConfigurationError, match=rf"'{name}' must leave at least one batch \(got 0\.1 of 4 batches\)"):
        fit(4, 4, max_epochs=1, **{name: 0.1})


def test_a_share_of_a_ranks_part_is_never_nothing():
    # of three batches two ranks have two and one: half of that would leave the second rank out
    assert [limit_length(part, 0.5, "limit_val_batches", part=True) for part in (2, 1, 0)] == [1, 1, 0]


def test_a_thousand_epochs_unless_something_else_is_said():
    assert make().max_epochs == 1000
    assert make(max_steps=5).max_epochs == -1
    assert make(max_time="00:00:00:05").max_epochs == -1
    assert make(min_epochs=2000).max_epochs == 2000


def test_an_accumulation_steps_at_the_end_of_every_kind_of_epoch():
    for loader, options in (
        (5, {}),
        (Unsized(5), {}),
        (7, {"limit_train_batches": 5}),
        (Unsized(5), {"limit_train_batches": 99}),
    ):
        trainer, model = fit(loader, max_epochs=2, accumulate_grad_batches=2, **options)
        assert (trainer.global_step, model.count("train")) == (6, 10)


# -- time --------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("max_time", ["00:00:00:10", timedelta(seconds=10), {"seconds": 10}], ids=str)
def test_max_time(monkeypatch, max_time):
    clock = Clock(monkeypatch)

    class Slow(Net):
        def training_step(self, batch, batch_idx):
            clock.now += 3
            return super().training_step(batch, batch_idx)

    trainer, model = fit(3, model=Slow(), max_time=max_time)
    assert (model.count("train"), trainer.current_epoch) == (4, 1)  # after 12 seconds
    trainer, model = fit(3, model=Slow(), max_time=max_time, min_epochs=2)
    assert (model.count("train"), trainer.current_epoch) == (6, 2)
    trainer, model = fit(3, model=Slow(), max_time=max_time, max_steps=2)
    assert model.count("train") == 2


def test_max_time_is_noticed_between_epochs(monkeypatch):
    clock = Clock(monkeypatch)

    class SlowEnd(Net):
        def on_train_epoch_end(self):
            clock.now += 20

    assert fit(3, model=SlowEnd(), max_time={"seconds": 10})[1].count("train") == 3


def test_a_fit_with_nothing_to_do_stops_the_clock(monkeypatch):
    clock = Clock(monkeypatch)
    trainer, model = fit(2, max_epochs=1)
    with pytest.warns(UserWarning, match="nothing to do"):
        trainer.fit(model, batches(2))
    clock.now += 100
    assert trainer.fit_loop.elapsed() == 0


def test_max_time_counts_what_a_resumed_run_has_used(monkeypatch, tmp_path):
    clock = Clock(monkeypatch)

    class Slow(Net):
        def training_step(self, batch, batch_idx):
            clock.now += 3
            return super().training_step(batch, batch_idx)

    first = make(max_time={"seconds": 10}, max_steps=3)
    first.fit(Slow(), batches(9))
    clock.now += 100  # what passes between fit and save is not training
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = make(max_time={"seconds": 14})
    second.fit(Slow(), batches(9), ckpt_path=tmp_path / "a.ckpt")
    assert second.global_step == 5
    third = make(max_time={"seconds": 9})
    with pytest.warns(UserWarning, match="max_time is used up"):
        third.fit(Slow(), batches(9), ckpt_path=tmp_path / "a.ckpt")
    assert third.global_step == 3


# -- validation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({}, [6, 12]),
        ({"val_check_interval": 1.0}, [6, 12]),
        ({"val_check_interval": 1}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        ({"val_check_interval": 0.5}, [3, 6, 9, 12]),
        ({"val_check_interval": 0.01}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        ({"val_check_interval": 4}, [4, 10]),
        ({"val_check_interval": 6}, [6, 12]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12]),
        ({"val_check_interval": 9, "check_val_every_n_epoch": None}, [9]),
        ({"check_val_every_n_epoch": 2}, [12]),
        ({"check_val_every_n_epoch": 3}, []),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 3}, [9, 12]),
        ({"limit_val_batches": 0}, []),
        ({"limit_val_batches": 0.0}, []),
        ({"limit_train_batches": 2}, [2, 4]),
        ({"limit_train_batches": 4, "val_check_interval": 0.5}, [2, 4, 6, 8]),
        ({"max_steps": 7}, [6]),
    ],
    ids=str,
)
def test_validations(options, after):
    _, model = fit(6, 2, **{"max_epochs": 2, **options})
    assert model.validated_after() == after
    assert model.count("val") == 2 * len(after)


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({}, [6, 12]),
        ({"val_check_interval": 4}, [4, 10]),
        ({"limit_train_batches": 3}, [3, 6]),
        ({"limit_train_batches": 99}, [6, 12]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12]),
    ],
    ids=str,
)
def test_validations_of_an_unsized_loader(options, after):
    assert fit(Unsized(6), 2, max_epochs=2, **options)[1].validated_after() == after


def test_an_interval_that_is_never_reached_is_an_error_before_training():
    for options in ({}, {"check_val_every_n_epoch": 5}):
        model = Net()
        with pytest.raises(ConfigurationError, match=r"'val_check_interval' must be at most the 6 training batches"):
            fit(6, 2, model=model, max_epochs=9, val_check_interval=7, **options)
        assert not model.calls
    with pytest.raises(ConfigurationError, match=r"'val_check_interval' is a share of the epoch \(0\.5\)"):
        fit(Unsized(6), 2, max_epochs=2, val_check_interval=0.5)
    with pytest.raises(ConfigurationError, match="must be a number of batches"):
        make(check_val_every_n_epoch=None)
    assert fit(6, 2, max_epochs=1, val_check_interval=7, limit_train_batches=0)[0].global_step == 0


@pytest.mark.parametrize(
    ("limit", "count"), [(0, 0), (1, 1), (3, 3), (9, 4), (0.5, 2), (1.0, 4), (0.0, 0), (None, 4)], ids=str
)
def test_limits_of_evaluation(limit, count):
    model = Net()
    trainer = make(max_epochs=1, limit_val_batches=limit, limit_test_batches=limit, limit_predict_batches=limit)
    trainer.fit(model, batches(1), batches(4))
    assert model.count("val") == count and trainer.num_val_batches == ([count] if count else [])
    trainer.test(model, batches(4), verbose=False)
    assert model.count("test") == count and trainer.num_test_batches == [count]
    assert trainer.predict(model, batches(4)) == list(range(count))


def test_loaders_that_are_not_wanted_are_not_asked_for():
    class WithLoader(Net):
        def val_dataloader(self):
            raise AssertionError("not wanted")

    fit(2, model=WithLoader(), max_epochs=1, limit_val_batches=0)


@pytest.mark.parametrize(("steps", "count"), [(0, 0), (1, 1), (2, 2), (99, 3), (-1, 3), (None, 2)])
def test_sanity_check(steps, count):
    trainer, model = fit(2, 3, max_epochs=1, num_sanity_val_steps=steps)
    assert model.count("sanity") == count and model.count("sanity start") == (count > 0)
    assert model.count("val") == 3 and trainer.global_step == 2
    calls = [call for call in model.calls if call[0] in ("sanity", "train")]
    assert all(call[0] == "sanity" for call in calls[:count])


def test_sanity_check_of_several_loaders_and_none_when_resuming(tmp_path):
    trainer, model = fit(2, [DataLoader(batches(3)), DataLoader(batches(1))], max_epochs=1, num_sanity_val_steps=2)
    assert [call[1:] for call in model.calls if call[0] == "sanity"] == [(0, 0), (0, 1), (1, 0)]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    model = Net()
    make(max_epochs=2, num_sanity_val_steps=2).fit(model, batches(2), batches(3), ckpt_path=tmp_path / "a.ckpt")
    assert model.count("sanity start") == 0 and model.count("val start") == 1


def test_several_validation_loaders():
    model = Net()
    trainer = make(max_epochs=1, limit_val_batches=2)
    trainer.fit(model, batches(1), [DataLoader(torch.ones(3, 1)), DataLoader(torch.ones(1, 1))])
    assert [call[1:] for call in model.calls if call[0] == "val"] == [(0, 0), (0, 1), (1, 0)]
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= set(trainer.callback_metrics)
    assert trainer.num_val_batches == [2, 1]
    results = trainer.validate(model, [DataLoader(torch.ones(3, 1)), DataLoader(torch.ones(1, 1))], verbose=False)
    assert [list(metrics) for metrics in results] == [["val_loss/dataloader_idx_0"], ["val_loss/dataloader_idx_1"]]


# -- trial runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "count"), [(True, 1), (1, 1), (3, 3), (99, 4)])
def test_fast_dev_run(value, count):
    model = Net()
    trainer = make(
        fast_dev_run=value, max_epochs=7, max_steps=50, min_epochs=3, num_sanity_val_steps=2, val_check_interval=2,
        overfit_batches=1, logger=True, enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(model, batches(4), batches(5))
    assert (trainer.global_step, model.count("train"), model.count("val")) == (
        count,
        count,
        min(5, trainer.fast_dev_run),
    )
    assert model.count("sanity") == 0 and trainer.checkpoint_callback is None and not trainer.loggers
    trainer.test(model, batches(9), verbose=False)
    assert model.count("test") == min(9, trainer.fast_dev_run)


@pytest.mark.parametrize(("value", "count"), [(2, 2), (0.5, 3), (1.0, 6), (1, 1)])
def test_overfit_batches(value, count):
    torch.manual_seed(0)
    data = torch.arange(6.0)[:, None]
    trainer, model = fit(
        DataLoader(data, shuffle=True), DataLoader(data, shuffle=True), max_epochs=3, overfit_batches=value
    )
    assert trainer.global_step == 3 * count and model.count("val") == 3 * count
    assert [call[3] for call in model.calls if call[0] == "train"] == 3 * list(range(count))
    assert trainer.limit_train_batches == 1.0


@pytest.mark.parametrize("loaders", [1, 2])
def test_overfit_batches_validates_on_the_training_batches(loaders):
    seen = {"train": [], "val": []}

    class Sees(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen["train"].append(batch.flatten().tolist())

        def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx):
            seen["val"].append((dataloader_idx, batch.flatten().tolist()))

    data, others = torch.arange(12.0)[:, None], DataLoader(-torch.ones(12, 1))
    trainer, model = fit(
        DataLoader(data, 2, shuffle=True), [others] * loaders, model=Sees(), max_epochs=2, overfit_batches=3,
        num_sanity_val_steps=1,
    )  # fmt: skip
    trained_on = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert seen["train"] == trained_on * 2
    evaluated = [(index, batch) for index in range(loaders) for batch in trained_on]
    assert seen["val"] == [(index, trained_on[0]) for index in range(loaders)] + evaluated * 2
    names = {"val_loss"} if loaders == 1 else {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    assert names <= set(trainer.callback_metrics)
    trainer, model = fit(DataLoader(data, 2), max_epochs=1, overfit_batches=3)
    assert model.count("val") == 0, "without validation data there is no validation"


def test_overfit_batches_reads_the_training_loader_a_second_time():
    with pytest.raises(ModelError, match=r"'overfit_batches' validates on the training batches.*a generator can't be"):
        fit((batch for batch in batches(3)), 1, max_epochs=1, overfit_batches=2)


def test_overfit_batches_reaches_a_sampler_inside_a_batch_sampler():
    data = torch.arange(6.0)[:, None]
    loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False))
    _, model = fit(loader, max_epochs=3, overfit_batches=2)
    assert [call[3] for call in model.calls] == [0, 2] * 3


# -- stopping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({}, 6, 1),  # after the running batch
        ({"min_epochs": 1}, 6, 1),
        ({"min_epochs": 3}, 12, 3),  # remembered until then, and not forgotten
        ({"min_steps": 7}, 7, 1),
        ({"min_steps": 5}, 6, 1),
        ({"min_epochs": 2, "min_steps": 11}, 11, 2),
    ],
    ids=str,
)
def test_should_stop_from_a_callback(options, steps, epochs):
    trainer, model = fit(4, 1, StopAt(6), max_epochs=9, **options)
    assert (trainer.global_step, model.count("train"), trainer.current_epoch) == (steps, steps, epochs)
    assert trainer.should_stop
    assert model.validated_after() == [4 * (n + 1) for n in range(epochs)]


def test_should_stop_from_the_model():
    class Stops(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    trainer, _ = fit(4, model=Stops(), max_epochs=9)
    assert (trainer.global_step, trainer.current_epoch) == (3, 0)
    assert trainer.is_last_batch is False


def test_early_stopping_counts():
    class Flat(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)

    trainer, _ = fit(4, 1, EarlyStopping("val_loss", patience=2), model=Flat(), max_epochs=9)
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    callback = EarlyStopping("val_loss", patience=2)
    trainer, _ = fit(9, 1, callback, model=Flat(), max_epochs=9, val_check_interval=2)
    assert (trainer.current_epoch, trainer.global_step, callback.wait_count) == (0, 6, 2)


# -- logging -----------------------------------------------------------------------------------------------------


class Rows(Logger):
    def __init__(self):
        self.steps = []

    @property
    def name(self):
        return "rows"

    @property
    def version(self):
        return 0

    def log_metrics(self, metrics, step):
        if "loss" in metrics:
            self.steps.append(step)


@pytest.mark.parametrize(
    ("every", "options", "steps"),
    [
        (1, {}, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, {}, [3, 6]),
        (50, {}, []),
        (0, {}, []),
        (1, {"accumulate_grad_batches": 3}, [1, 2, 3, 4]),
        (2, {"accumulate_grad_batches": 3}, [2, 4]),
    ],
    ids=str,
)
def test_log_every_n_steps(every, options, steps):
    rows = Rows()
    fit(4, max_epochs=2, logger=rows, log_every_n_steps=every, **options)
    assert rows.steps == steps


def test_log_every_n_steps_with_several_steps_a_batch():
    class Twice(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().step()

    rows = Rows()
    trainer, _ = fit(6, model=Twice(), max_epochs=1, logger=rows, log_every_n_steps=3)
    assert trainer.global_step == 12 and rows.steps == [4, 6, 10, 12]  # the first step at or after each multiple


# -- loaders -----------------------------------------------------------------------------------------------------


class Counted(Net):
    """Counts how often its loaders are asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def train_dataloader(self):
        self.asked.append(("train", self.trainer.current_epoch))
        return batches(2)

    def val_dataloader(self):
        self.asked.append(("val", self.trainer.current_epoch))
        return batches(1)


@pytest.mark.parametrize(("every", "epochs"), [(0, [0]), (1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])])
def test_reload(tmp_path, every, epochs):
    model = Counted()
    trainer = make(max_epochs=4, reload_dataloaders_every_n_epochs=every)
    trainer.fit(model)
    assert model.asked == [(kind, epoch) for epoch in epochs for kind in ("train", "val")]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Counted()
    make(max_epochs=5, reload_dataloaders_every_n_epochs=every).fit(again, ckpt_path=tmp_path / "a.ckpt")
    assert [kind for kind, _ in again.asked] == ["train", "val"]  # fresh already


def test_a_generator_per_epoch():
    class Generators(Net):
        def train_dataloader(self):
            return (batch for batch in batches(3))

    trainer, _ = fit(None, model=Generators(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert trainer.global_step == 9 and trainer.current_epoch == 3
    assert trainer.num_training_batches == float("inf")


def test_an_exhausted_generator_is_no_epoch():
    trainer, _ = fit((batch for batch in batches(3)), max_epochs=1)
    assert trainer.global_step == 3
    with pytest.raises(ModelError, match=r"the training loader \(in epoch 1\) gave no batch: a generator can be read"):
        fit((batch for batch in batches(3)), max_epochs=2)
    trainer, model = fit((batch for batch in batches(6)), max_epochs=3, limit_train_batches=2)
    assert [call[3] for call in model.calls] == [0, 1, 2, 3, 4, 5]  # what a limit leaves is still there
    with pytest.raises(ModelError, match="the validation loader gave no batch: a generator can be read only once"):
        fit(2, (batch for batch in batches(3)), max_epochs=2)


def test_the_sanity_check_takes_nothing_from_a_generator():
    _, model = fit(2, (batch for batch in batches(3)), max_epochs=1, num_sanity_val_steps=2)
    assert model.count("sanity") == 0 and model.count("val") == 3


class OwnIterator:
    """A loader that is its own iterator: each ``iter()`` begins anew, and a batch past its length is an error."""

    def __init__(self, count):
        self.count = count
        self.begun = self.given = self.next = 0

    def __len__(self):
        return self.count

    def __iter__(self):
        self.begun += 1
        self.next = 0
        return self

    def __next__(self):
        assert self.next < self.count, "a batch past its length"
        self.next += 1
        self.given += 1
        return torch.full((2, 1), float(self.next))


class Zipped(OwnIterator):
    """Several loaders in one, which must be of one length, and the others are endless."""

    def __iter__(self):
        self.begun += 1
        for index, _ in zip(range(self.count), itertools.count(), strict=True):
            self.given += 1
            yield torch.full((2, 1), float(index))


class Bare(OwnIterator):
    """Its iterator can do nothing but give the next batch: all that a for loop needs."""

    def __iter__(self):
        self.begun += 1
        self.next = 0
        return Next(self.__next__)


class Next:
    def __init__(self, give):
        self.give = give

    def __next__(self):
        return self.give()


@pytest.mark.parametrize("kind", [OwnIterator, Zipped, Bare])
@pytest.mark.parametrize("limit", [1.0, 2, 9])
def test_iter_once_per_epoch_and_no_batch_past_the_length(kind, limit):
    train, val, other = kind(4), kind(3), kind(3)
    trainer, model = fit(
        train, [val, other], max_epochs=2, num_sanity_val_steps=1, limit_train_batches=limit, limit_val_batches=limit,
        val_check_interval=2 if limit == 1.0 else None,
    )  # fmt: skip
    used, evaluated = (2, 2) if limit == 2 else (4, 3)
    assert (train.begun, train.given) == (2, 2 * used) and trainer.global_step == 2 * used
    validations = model.count("val start")
    for loader in (val, other):
        assert (loader.begun, loader.given) == (1 + validations, 1 + validations * evaluated)
    assert model.count("sanity") == 2
    test, predict = kind(3), kind(3)
    trainer = make(limit_test_batches=limit, limit_predict_batches=limit)
    trainer.test(model, test, verbose=False)
    assert len(trainer.predict(model, predict)) == evaluated
    assert [(loader.begun, loader.given) for loader in (test, predict)] == [(1, evaluated)] * 2


def test_a_batch_sampler_that_is_longer_than_it_says():
    class Longer(BatchSampler):
        def __len__(self):
            return 2

    read = []

    class Data(torch.utils.data.Dataset):
        def __getitem__(self, index):
            read.append(index)
            return torch.ones(1)

    loader = DataLoader(Data(), batch_sampler=Longer(range(6), 2, False))
    fit(loader, loader, max_epochs=1)
    assert read == [0, 1, 2, 3] * 2


@pytest.mark.slow
def test_an_iterable_dataset_in_several_workers_is_evaluated_whole():
    """torch guesses its length: each worker's last batch may be a short one, so that there are more."""

    class Sharded(Stream):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info()
            return iter(torch.arange(float(self.count))[worker.id :: worker.num_workers, None])

    loader = DataLoader(Sharded(10, said=10), 4, num_workers=2)
    assert len(loader) == 3
    trainer = make()
    assert len(trainer.predict(Net(), loader)) == 4


class Stream(IterableDataset):
    def __init__(self, count, said):
        self.count = count
        self.said = said

    def __len__(self):
        return self.said

    def __iter__(self):
        return iter(torch.arange(float(self.count))[:, None])


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_loader_that_is_wrong_about_its_length():
    trainer, model = fit(DataLoader(Stream(7, said=3)), 1, max_epochs=2, accumulate_grad_batches=2)
    assert [call[2] for call in model.calls if call[0] == "train"] == [0, 1, 2] * 2
    assert trainer.global_step == 4 and model.validated_after() == [3, 6]
    trainer, model = fit(DataLoader(Stream(3, said=7)), 1, max_epochs=2, accumulate_grad_batches=2)
    assert [call[2] for call in model.calls if call[0] == "train"] == [0, 1, 2] * 2
    assert trainer.global_step == 4 and model.validated_after() == [3, 6]


@pytest.mark.parametrize(
    "batch", [torch.ones(2, 1), [torch.ones(2, 1), 1], (torch.ones(2, 1), None), {"x": 1}], ids=str
)
def test_a_list_of_batches_is_one_loader(batch):
    class Any(Net):
        def training_step(self, batch, batch_idx):
            self.calls.append(batch)
            return self.layer(torch.ones(1, 1, device=self.device)).mean()

    _, model = fit([batch, batch, batch], model=Any(), max_epochs=1)
    assert len(model.calls) == 3 and all(type(call) is type(batch) for call in model.calls)


def test_an_epoch_that_the_model_ends():
    class Ends(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    trainer, model = fit(6, model=Ends(), max_epochs=2, accumulate_grad_batches=2)
    assert (trainer.global_step, trainer.current_epoch, model.count("train")) == (4, 2, 6)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25  # both epochs count

    class Never(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    trainer, model = fit(6, model=Never(), max_epochs=2)
    assert (trainer.global_step, trainer.current_epoch, model.count("train")) == (0, 2, 0)


# -- a fit that has nothing to do, and the next one --------------------------------------------------------------


def test_a_second_fit_says_that_it_does_nothing_and_can_go_on():
    trainer, model = fit(4, max_epochs=1)
    with pytest.warns(UserWarning, match=r"nothing to do: max_epochs=1 is reached after 1 epoch\(s\)"):
        trainer.fit(model, batches(4))
    assert trainer.global_step == 4
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, batches(4))
    assert (trainer.global_step, trainer.current_epoch) == (12, 3)
    trainer, model = fit(4, max_steps=6)
    with pytest.warns(UserWarning, match="max_steps=6 is reached at optimizer step 6"):
        trainer.fit(model, batches(4))
    trainer.max_steps = 8
    trainer.fit(model, batches(4))
    assert trainer.global_step == 8


# -- shares of ranks ---------------------------------------------------------------------------------------------


class Buckets:
    """A batch sampler of the user's own, with a sampler inside that it doesn't draw from."""

    def __init__(self, count=7):
        self.count = count
        self.sampler = range(count)

    def __len__(self):
        return self.count

    def __iter__(self):
        order = torch.randperm(self.count).tolist()
        return iter([[2 * index, 2 * index + 1] for index in order])


class Endless:
    def __iter__(self):
        while True:
            yield torch.randint(0, 14, (2,)).tolist()


def shares(loader, ranks=2, training=True):
    state = torch.get_rng_state()
    found = []
    for rank in range(ranks):
        torch.manual_seed(rank)  # ranks' own generators have gone different ways
        mine = distribute(loader, num_replicas=ranks, rank=rank, training=training, seed=5)
        found.append([sample for batch in mine for sample in batch.flatten().tolist()])
        assert len(mine) == sum(1 for _ in mine)
    torch.set_rng_state(state)
    return found


DATA = torch.arange(14)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_sampler=Buckets()),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, False)),
        DataLoader(DATA, 2, shuffle=True),
        DataLoader(DATA, sampler=RandomSampler(DATA), batch_size=None),
        DataLoader(DATA, sampler=Buckets(), batch_size=None),
    ],
    ids=["own batch sampler", "torch's batch sampler", "shuffled", "unbatched", "batches as samples"],
)
def test_ranks_share_every_kind_of_loader(loader):
    first, second = shares(loader)
    assert set(first) | set(second) == set(range(14))
    assert len(first) == len(second) <= 8
    assert len(set(first) & set(second)) <= 2  # the padding
    assert first + second != sorted(first + second)  # still shuffled
    ordered = shares(loader, training=False)
    assert sorted(ordered[0] + ordered[1]) == list(range(14))  # each once


def test_a_weighted_sampler_inside_a_batch_sampler_keeps_its_weights():
    weights = torch.zeros(14)
    weights[3] = weights[8] = 1.0
    sampler = WeightedRandomSampler(weights, 14)
    for loader in (
        DataLoader(DATA, 2, sampler=sampler),
        DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        first, second = shares(loader)
        assert set(first) | set(second) == {3, 8} and len(first) == len(second) == 7


def test_an_endless_batch_sampler_is_read_a_piece_at_a_time():
    found = []
    for rank in range(2):
        torch.manual_seed(rank)
        mine = distribute(DataLoader(DATA, batch_sampler=Endless()), num_replicas=2, rank=rank, training=True, seed=5)
        before = torch.get_rng_state()
        iterator = iter(mine.batch_sampler)
        found.append([next(iterator) for _ in range(3000)])
        assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    whole = Endless().__iter__()
    expected = [next(whole) for _ in range(6000)]
    assert found == [expected[0::2], expected[1::2]]


def test_what_the_user_has_shared_out_is_left_alone():
    from torch.utils.data import DistributedSampler

    class Own:
        num_replicas, rank = 2, 1

        def __len__(self):
            return 7

        def __iter__(self):
            return iter(range(7, 14))

    given = DistributedSampler(DATA, 2, 1)
    for loader in (
        DataLoader(DATA, 2, sampler=given),
        DataLoader(DATA, batch_sampler=BatchSampler(given, 2, False)),
        DataLoader(DATA, 2, sampler=Own()),
    ):
        assert distribute(loader, num_replicas=2, rank=1, training=True, seed=0) is loader


class Kept(DataLoader):
    """A loader of the user's own class, with an attribute that a new object would lack."""

    def __init__(self, *args, note, **options):
        super().__init__(*args, **options)
        self.note = note


def test_a_subclass_of_dataloader_stays_one():
    mine = distribute(Kept(DATA, 2, shuffle=True, note="x"), num_replicas=2, rank=0, training=True, seed=0)
    assert type(mine) is Kept and mine.note == "x" and len(mine) == 4


@pytest.mark.parametrize("batch_size", [2, None])
def test_what_is_skipped_ends_with_the_data(batch_size):
    """A checkpoint may say that an epoch was at its thousand millionth batch."""
    come = []
    loader = with_skip(DataLoader(DATA, batch_size), 2**40, lambda: come.append(True))
    assert list(loader) == [] and come == [True]
