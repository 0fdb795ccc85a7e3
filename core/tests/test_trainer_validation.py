"""Test when validation runs, on how many batches, the sanity check, and several validation loaders."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from counting_net import Net, Unsized, batches, fit, make
from torch.utils.data import DataLoader

from torchhal.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("accelerator")


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


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({"val_check_interval": timedelta(seconds=4)}, [4, 8, 12]),
        ({"val_check_interval": {"seconds": 2.5}}, [3, 6, 9, 12]),
        ({"val_check_interval": "00:00:00:07", "check_val_every_n_epoch": None}, [7]),
        ({"val_check_interval": timedelta(seconds=4), "check_val_every_n_epoch": 2}, [7, 11]),
        ({"val_check_interval": timedelta(days=1)}, []),
    ],
    ids=str,
)
def test_validations_by_time(monkeypatch, options, after):
    """A batch takes a second, and a validation any time: the interval begins at its end."""
    now = 0.0

    class Timed(Net):
        def training_step(self, batch, batch_idx):
            nonlocal now
            now += 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            nonlocal now
            now += 50
            return super().validation_step(batch, batch_idx)

    monkeypatch.setattr("torchhal.trainer._shared_clock.time", SimpleNamespace(monotonic=lambda: now))
    _, model = fit(6, 2, model=Timed(), max_epochs=2, **options)
    assert model.validated_after() == after


def test_unreachable_val_check_interval():
    """A val_check_interval that is never reached is an error before training."""
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


def test_unused_loaders_not_requested():
    """A loader hook with a limit of 0 is not called."""

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


def test_sanity_check_of_several_loaders(tmp_path):
    """The sanity check reads every loader, and does not run in a resumed fit."""
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
