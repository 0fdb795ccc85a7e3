"""Timer: readings of each stage, and the end of training by time."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from minimal_net import BATCHES, Net
from quiet_trainer import make

from torchhal import Callback
from torchhal.errors import ConfigurationError
from torchhal.trainer.callbacks import Timer


class Slow(Net):
    """Each batch of training takes 20 ms; one of the other stages 10 ms."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        time.sleep(0.01)

    test_step = predict_step = validation_step


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("00:12:00:01", 43201), (timedelta(weeks=1), 604800), ({"minutes": 2}, 120), (None, None)],
)
def test_duration(duration, seconds):
    remaining = Timer(duration).time_remaining()
    assert remaining == seconds


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"duration": "1:2"}, ConfigurationError, "'duration' must be a positive timedelta"),
        ({"duration": {"lightyears": 1}}, ConfigurationError, "'duration' must be"),
        ({"interval": "batch"}, ValueError, "'interval' must be 'step' or 'epoch'"),
        ({"verbose": 1}, ConfigurationError, "'verbose' must be a bool"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        Timer(**arguments)


def test_refuses_an_unknown_stage():
    with pytest.raises(ValueError, match="did you mean 'train'"):
        Timer().time_elapsed("training")


def test_measures_each_stage():
    timer = Timer()
    trainer = make(timer, num_sanity_val_steps=1)
    assert timer.start_time() is None and timer.end_time() is None and timer.time_elapsed("test") == 0
    trainer.fit(Slow(), BATCHES, BATCHES)
    assert timer.time_elapsed() >= 0.06 and timer.time_elapsed("validate") >= 0.02
    assert timer.time_elapsed("sanity_check") >= 0.01
    assert timer.end_time() - timer.start_time() == timer.time_elapsed()
    trainer.test(dataloaders=BATCHES)
    trainer.predict(dataloaders=BATCHES)
    assert timer.time_elapsed("test") >= 0.02 and timer.time_elapsed("predict") >= 0.02
    assert timer.time_remaining() is None


def test_adds_up_validations():
    timer = Timer()
    make(timer, max_epochs=3).fit(Slow(), BATCHES, BATCHES)
    assert timer.time_elapsed("validate") >= 0.06 > timer.end_time("validate") - timer.start_time("validate")


@pytest.mark.parametrize(("interval", "batches"), [("step", 3), ("epoch", 10)])
def test_ends_training(interval, batches, capsys, monkeypatch):
    """By a clock that the batches move, 20 ms each."""
    now = 0.0

    class Timed(Net):
        def training_step(self, batch, batch_idx):
            nonlocal now
            now += 0.02
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("torchhal.trainer.callbacks.timer.time", SimpleNamespace(monotonic=lambda: now))
    timer = Timer({"milliseconds": 50}, interval)
    trainer = make(timer, max_epochs=5, enable_progress_bar=False)
    trainer.fit(Timed(), BATCHES * 5)
    assert trainer.global_step == batches and timer.time_remaining() <= 0
    assert trainer.fit_loop.stop.reason() == "Timer: its time is used up, training took 0:00:00"
    assert "Timer: its time is used up" in capsys.readouterr().out


def test_reaches_min_epochs_first():
    trainer = make(Timer({"milliseconds": 1}), max_epochs=5, min_epochs=2)
    trainer.fit(Slow(), BATCHES)
    assert trainer.current_epoch == 2


def test_error_stops_the_clock():
    class Fails(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            raise KeyError

    timer = Timer()
    with pytest.raises(KeyError):
        make(timer, Fails()).fit(Slow(), BATCHES)
    assert timer.end_time() is not None


def test_resumed_run_goes_on_counting(tmp_path):
    first = make(Timer(), max_epochs=1)
    first.fit(Slow(), BATCHES)
    first.save_checkpoint(tmp_path / "here.ckpt")
    before = first.callbacks[0].time_elapsed()
    timer = Timer()
    make(timer, max_epochs=2).fit(Slow(), BATCHES, ckpt_path=tmp_path / "here.ckpt")
    assert timer.time_elapsed() == pytest.approx(before + timer.end_time() - timer.start_time())


def test_resumed_run_has_nothing_to_do(tmp_path):
    first = make(Timer(), max_epochs=1)
    first.fit(Slow(), BATCHES)
    first.save_checkpoint(tmp_path / "here.ckpt")
    again = make(Timer({"milliseconds": 20}), max_epochs=9)
    with pytest.warns(UserWarning, match="nothing to do: Timer: its time is used up"):
        again.fit(Slow(), BATCHES, ckpt_path=tmp_path / "here.ckpt")
    assert again.global_step == 2


def fit_with_uneven_clocks():
    import os

    timer = Timer({"milliseconds": 60} if os.environ["RANK"] == "1" else {"hours": 1})
    trainer = make(timer, devices=2, strategy="ddp", max_epochs=50)
    trainer.fit(Slow(), BATCHES)
    return trainer.global_step


def test_ranks_stop_at_the_same_step(world2):
    """Rank 1's clock alone is over."""
    first, second = world2.run(fit_with_uneven_clocks)
    assert first == second < 80
