"""What a run says of itself on the terminal, and the loss of a model that can't log."""

import copy
import csv
import logging
import re
from datetime import timedelta

import hardware
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Callback, Module, Trainer
from torchhal.trainer.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar

pytestmark = pytest.mark.usefixtures("accelerator")

BATCHES = [torch.ones(2, 1)] * 2


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scored(Plain, Module):
    def validation_step(self, batch, batch_idx):
        self.log("score", 1.0)


class Stop(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = True


def make(folder, *callbacks, **options):
    defaults = {
        "accelerator": hardware.name(), "devices": 1, "default_root_dir": folder, "enable_model_summary": False,
        "max_epochs": 2,
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def said(err):
    """The lines of torchhal, without what a bar has drawn before them."""
    return [line for line in re.split("[\r\n]+", err) if line.startswith("torchhal: ")]


def test_start_and_end_lines(tmp_path, capsys):
    """A run writes one line at its start and one at its end."""
    trainer = make(tmp_path)
    trainer.fit(Scored(), BATCHES, BATCHES)
    parts = f"accelerator={hardware.name()}, devices=[{hardware.device()}], strategy=single_device, precision=32-true"
    assert said(capsys.readouterr().err) == [
        f"torchhal: fit with {parts}, 1 process",
        "torchhal: fit ended at step 4: max_epochs=2 is reached after 2 epoch(s); run in "
        f"{trainer.log_dir!r}; newest checkpoint {trainer.checkpoint_callback.best_model_path!r}",
    ]
    trainer.validate(dataloaders=BATCHES, verbose=False)
    assert said(capsys.readouterr().err) == [], "the parts are known"
    make(tmp_path).validate(Scored(), BATCHES, verbose=False)
    assert said(capsys.readouterr().err) == [f"torchhal: validate with {parts}, 1 process"]


@pytest.mark.parametrize(
    ("callbacks", "options", "why"),
    [
        ([], {"max_steps": 3}, "step 3: max_steps=3 is reached at optimizer step 3"),
        ([], {"max_time": timedelta(microseconds=1)}, r"step 1: max_time is used up \(0:00:00.000001\)"),
        ([Stop()], {}, "step 1: trainer.should_stop is set"),
        (
            [EarlyStopping("score", patience=1)],
            {"max_epochs": 9},
            r"step 4: EarlyStopping: score: stopping, as it did not improve for 1 check\(s\); the best was 1",
        ),
        ([], {"limit_train_batches": 0}, "step 0: its limit allows no training batch"),
        ([], {"max_epochs": 0}, r"step 0: max_epochs=0 is reached after 0 epoch\(s\)"),
    ],
)
def test_why_a_fit_ended(tmp_path, capsys, callbacks, options, why):
    callbacks = copy.deepcopy(callbacks)  # each accelerator's run has its own
    make(tmp_path, *callbacks, logger=False, enable_checkpointing=False, **options).fit(Scored(), BATCHES, BATCHES)
    assert re.fullmatch(f"torchhal: fit ended at {why}", said(capsys.readouterr().err)[-1])


def test_the_best_checkpoint_is_named(tmp_path, capsys):
    best = ModelCheckpoint(tmp_path, monitor="score")
    make(tmp_path, best, logger=False).fit(Scored(), BATCHES, BATCHES)
    assert said(capsys.readouterr().err)[-1].endswith(f"; best checkpoint {best.best_model_path!r}")


def test_a_resume_names_file_epoch_and_step(tmp_path, capsys):
    first = make(tmp_path, max_steps=3)
    first.fit(Scored(), BATCHES, BATCHES)
    path = str(tmp_path / "x.ckpt")
    first.save_checkpoint(path)
    capsys.readouterr()
    make(tmp_path, max_epochs=3).fit(Scored(), BATCHES, BATCHES, ckpt_path=path)
    assert said(capsys.readouterr().err)[1] == f"torchhal: fit continues from {path!r}: epoch 1, batch 1, step 3"
    last = first.checkpoint_callback.best_model_path
    make(tmp_path).validate(Scored(), BATCHES, ckpt_path=last, verbose=False)
    assert said(capsys.readouterr().err)[1].startswith(f"torchhal: validate uses the weights of {last!r}: epoch ")


@pytest.mark.parametrize(
    ("callbacks", "options"), [([], {"enable_progress_bar": False}), ([ProgressBar(refresh_rate=0)], {})]
)
def test_quiet_without_a_progress_bar(tmp_path, capsys, callbacks, options):
    make(tmp_path, *callbacks, **options).fit(Scored(), BATCHES, BATCHES)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "")


def test_the_logger_torchhal_decides(tmp_path, capsys, caplog):
    with caplog.at_level(logging.INFO, logger="torchhal"):  # somebody listens
        make(tmp_path, enable_progress_bar=False).fit(Scored(), BATCHES, BATCHES)
    assert [record.message.split()[:2] for record in caplog.records] == [["fit", "with"], ["fit", "ended"]]
    assert said(capsys.readouterr().err) == []
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="torchhal"):
        make(tmp_path).fit(Scored(), BATCHES, BATCHES)
    assert said(capsys.readouterr().err) == [] and not caplog.records


@pytest.mark.slow_on_sim
def test_rank_0_alone_speaks(tmp_path, capfd):
    trainer = make(tmp_path, strategy="ddp_spawn", devices=2)
    trainer.fit(Scored(), DataLoader(torch.ones(8, 1), 2), DataLoader(torch.ones(8, 1), 2))
    first, last = said(capfd.readouterr().err)
    assert first.startswith("torchhal: fit with")
    assert first.endswith("strategy=ddp_spawn, precision=32-true, 2 processes")
    assert last.startswith("torchhal: fit ended at step 4: max_epochs=2")


# -- the loss of a plain module --------------------------------------------------------------------------------------


class Batch:
    """Of a size that nobody knows."""

    def __init__(self):
        self.values = torch.ones(2, 1)

    def to(self, device, non_blocking=False):
        self.values = self.values.to(device)
        return self


class OfObjects(Plain):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch.values, batch_idx)}


class Skips(Plain):
    def training_step(self, batch, batch_idx):
        return None if batch_idx else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("model", "data"),
    [(Plain(), BATCHES), (OfObjects(), [Batch(), Batch()]), (Skips(), BATCHES)],
    ids=["tensor", "dict", "None"],
)
def test_the_loss_of_a_plain_module_is_logged(tmp_path, capsys, model, data):
    trainer = make(tmp_path, log_every_n_steps=1, max_epochs=3)
    trainer.fit(model, data)
    metrics = trainer.callback_metrics
    assert set(metrics) == {"loss", "loss_step", "loss_epoch"} and metrics["loss"] == metrics["loss_epoch"]
    with open(trainer.logger.metrics_path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"loss_step", "loss_epoch"} <= set(rows[0])
    means = [float(row["loss_epoch"]) for row in rows if row["loss_epoch"]]
    assert len(means) == 3 and means == sorted(means, reverse=True)
    assert "loss_epoch=" in capsys.readouterr().err, "in the bar"


def test_plain_module_loss_weighting(tmp_path):
    """The mean of a plain module's loss is weighed by the batch."""

    class Values(Plain):
        def training_step(self, batch, batch_idx):
            return batch.mean() + 0 * self.layer(batch).sum()

    trainer = make(tmp_path, enable_progress_bar=False, max_epochs=1)
    trainer.fit(Values(), [torch.full((1, 1), 1.0), torch.full((3, 1), 5.0)])
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(4.0)
    assert trainer.callback_metrics["loss_step"].item() == pytest.approx(5.0)


def test_a_module_that_can_log_decides_itself(tmp_path):
    trainer = make(tmp_path, enable_progress_bar=False)
    trainer.fit(Scored(), BATCHES)
    assert trainer.callback_metrics == {}
