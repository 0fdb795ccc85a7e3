"""Test exact numbers of steps, batches, validations and epochs under every limit of the Trainer."""

import time
from datetime import timedelta

import pytest
import torch
from counting_net import Net, Unsized, batches, fit, make
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.sampler import BatchSampler

from torchhal import Callback
from torchhal.errors import ConfigurationError, ModelError
from torchhal.trainer.callbacks import EarlyStopping
from torchhal.trainer.data._loaders import limit_length
from torchhal.trainer.loggers import Logger

pytestmark = pytest.mark.usefixtures("accelerator")


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
def test_share_without_batches_refused(name):
    """A share that leaves no batch is an error."""
    with pytest.raises(ConfigurationError, match=rf"'{name}' must leave at least one batch \(got 0\.1 of 4 batches\)"):
        fit(4, 4, max_epochs=1, **{name: 0.1})


def test_share_of_rank_keeps_one_batch():
    """A share of a rank's part keeps at least one batch."""
    # of three batches two ranks have two and one: half of that would leave the second rank out
    assert [limit_length(part, 0.5, "limit_val_batches", part=True) for part in (2, 1, 0)] == [1, 1, 0]


def test_default_max_epochs():
    """A Trainer without limits runs a thousand epochs."""
    assert make().max_epochs == 1000
    assert make(max_steps=5).max_epochs == -1
    assert make(max_time="00:00:00:05").max_epochs == -1
    assert make(min_epochs=2000).max_epochs == 2000


def test_accumulation_steps_at_epoch_end():
    """An accumulation steps at the end of every kind of epoch."""
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


def test_idle_fit_stops_clock(monkeypatch):
    """A fit with nothing to do stops the clock of max_time."""
    clock = Clock(monkeypatch)
    trainer, model = fit(2, max_epochs=1)
    with pytest.warns(UserWarning, match="nothing to do"):
        trainer.fit(model, batches(2))
    clock.now += 100
    assert trainer.fit_loop.elapsed() == 0


def test_max_time_after_resume(monkeypatch, tmp_path):
    """max_time counts the time that a resumed run has used before."""
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


def test_overfit_batches_refuses_generator():
    """overfit_batches reads the training loader a second time, which a generator can't give."""
    with pytest.raises(ModelError, match=r"'overfit_batches' validates on the training batches.*a generator can't be"):
        fit((batch for batch in batches(3)), 1, max_epochs=1, overfit_batches=2)


def test_overfit_batches_with_batch_sampler():
    """overfit_batches replaces a random sampler inside a batch sampler."""
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


def test_log_every_n_steps_in_manual_optimization():
    """Several optimizer steps in a batch log at the first one at or after each multiple."""

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


# -- a fit that has nothing to do, and the next one --------------------------------------------------------------


def test_second_fit_needs_higher_limit():
    """A second fit at its limit warns that it does nothing, and goes on with a higher one."""
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
