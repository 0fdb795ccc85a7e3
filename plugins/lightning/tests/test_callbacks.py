"""Lightning's own callbacks and loggers work beside a LightningModule, as under Lightning's Trainer."""

import csv

import pytest
import torch
from lightning_models import dataset, fit, made, models, same
from torch.utils.data import DataLoader

import torchhal


def both(pl, options, name="Plain"):
    """Fit by either Trainer; return (module, Trainer) of each, Lightning's first. ``options`` makes new callbacks."""
    cls = models(pl)[name]
    results = []
    for number, trainer_of in enumerate((pl.Trainer, torchhal.Trainer)):
        module = made(cls)
        results.append((module, fit(trainer_of, module, **options(number))))
    same(results[1][0], results[0][0])
    return results


def test_model_checkpoint(pl, tmp_path):
    def options(number):
        saver = pl.callbacks.ModelCheckpoint(
            tmp_path / str(number), "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True
        )
        return {"callbacks": [saver], "enable_checkpointing": True}

    (_, theirs), (module, mine) = both(pl, options)
    files = [sorted(path.name for path in (tmp_path / number).iterdir()) for number in "01"]
    assert files[0] == files[1] and len(files[1]) == 3
    saver = mine.checkpoint_callback
    assert [type(each).__name__ for each in mine.callbacks].count("ModelCheckpoint") == 1
    assert saver.best_model_path.replace("/1/", "/0/") == theirs.checkpoint_callback.best_model_path
    assert float(saver.best_model_score) == pytest.approx(float(theirs.checkpoint_callback.best_model_score))
    again = type(module).load_from_checkpoint(saver.last_model_path, width=8)
    for key, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)


def test_the_default_callbacks_are_torchhals(pl, tmp_path):
    trainer = fit(torchhal.Trainer, made(models(pl)["Plain"]), enable_checkpointing=True, default_root_dir=tmp_path)
    assert type(trainer.checkpoint_callback).__module__.startswith("torchhal.")
    assert trainer.checkpoint_callback.best_model_path


def test_early_stopping(pl):
    def options(number):
        stopper = pl.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1)
        return {"callbacks": [stopper], "max_epochs": 9}

    (_, theirs), (_, mine) = both(pl, options)
    assert mine.current_epoch == theirs.current_epoch == 2
    assert mine.early_stopping_callback.stopped_epoch == theirs.early_stopping_callback.stopped_epoch


def test_learning_rates_and_a_csv_file(pl, tmp_path):
    def options(number):
        logger = pl.loggers.CSVLogger(tmp_path / str(number), name="run", version=0)
        monitor = pl.callbacks.LearningRateMonitor("step")
        return {"callbacks": [monitor], "logger": logger, "log_every_n_steps": 2}

    both(pl, options, "Scheduled")
    tables = []
    for number in "01":
        with open(tmp_path / number / "run" / "version_0" / "metrics.csv") as file:
            tables.append(list(csv.DictReader(file)))
    columns = {"lr-SGD", "train_loss_step", "train_loss_epoch", "val_loss"}
    for column in columns:
        theirs, mine = ([float(row[column]) for row in table if row[column]] for table in tables)
        assert mine == pytest.approx(theirs), column
    assert (tmp_path / "1" / "run" / "version_0" / "hparams.yaml").exists()


@pytest.mark.parametrize("kind", ["TQDMProgressBar", "RichProgressBar"])
def test_progress_bars(pl, kind, capsys):
    options = {"callbacks": [getattr(pl.callbacks, kind)()], "enable_progress_bar": True}
    trainer = fit(torchhal.Trainer, made(models(pl)["Plain"]), **options)
    assert type(trainer.progress_bar_callback).__name__ == kind
    assert not any(type(each).__module__.startswith("torchhal") for each in trainer.callbacks)
    said = capsys.readouterr()
    assert "Epoch 2" in said.out + said.err and "train_loss" in said.out + said.err


def test_other_callbacks(pl, tmp_path):
    def options(number):
        callbacks = pl.callbacks
        return {
            "callbacks": [
                callbacks.GradientAccumulationScheduler({0: 1, 1: 3}),
                callbacks.Timer(),
                callbacks.ModelSummary(),
                callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1),
            ],
            "max_epochs": 4,
        }

    (theirs, _), (mine, _) = both(pl, options)
    for key, value in theirs.state_dict().items():
        assert torch.allclose(mine.state_dict()[key], value), key


@pytest.mark.parametrize("loaders", [1, 2])
def test_predictions_are_written(pl, loaders):
    class Writer(pl.callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            found.append((batch_idx, dataloader_idx, batch_indices, prediction.shape))

        def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
            found.append((len(predictions), batch_indices))

    results = []
    for trainer_of in (pl.Trainer, torchhal.Trainer):
        found = []
        module = made(models(pl)["Plain"])
        module.forward = lambda batch, module=module: module.body(batch[0])
        trainer = trainer_of(
            accelerator="cpu", devices=1, logger=False, callbacks=[Writer("batch_and_epoch")],
            enable_progress_bar=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.predict(module, [DataLoader(dataset(18, 9), 8), DataLoader(dataset(4, 2), 2)][:loaders])
        results.append(found)
    assert results[0] == results[1]


def test_finetuning(pl):
    class Head(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.body[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.body[0], optimizer, lr=1e-3)

    class Model(models(pl)["Plain"]):
        def configure_optimizers(self):
            return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)

    notes = []
    for trainer_of in (pl.Trainer, torchhal.Trainer):
        module = made(Model)
        fit(trainer_of, module, callbacks=[Head()])
        notes.append(module)
    same(notes[1], notes[0])


class Data:
    """What a data module of either tree has; the test adds the base class."""

    def prepare_data(self):
        self.calls = ["prepare_data"]

    def setup(self, stage):
        self.calls.append((stage, self.trainer.training, self.trainer.state.fn))

    def train_dataloader(self):
        return DataLoader(dataset(), 8, shuffle=True)

    def val_dataloader(self):
        return [DataLoader(dataset(24, 6), 8), DataLoader(dataset(16, 7), 8)]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + dataloader_idx, batch[1]]

    def teardown(self, stage):
        self.calls.append(("teardown", stage))


def test_a_data_module(pl):
    class Model(models(pl)["Plain"]):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            loss = self.loss(batch)
            self.note("val", batch_idx, dataloader_idx, loss)
            self.log("val_loss", loss)

    kind = type("DataOfATree", (Data, pl.LightningDataModule), {})
    results = []
    for trainer_of in (pl.Trainer, torchhal.Trainer):
        torch.manual_seed(0)
        module, data = Model(), kind()
        torch.manual_seed(1)
        trainer = trainer_of(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, max_epochs=2,
        )  # fmt: skip
        trainer.fit(module, datamodule=data)
        results.append((module, data, sorted(trainer.callback_metrics)))
    same(results[1][0], results[0][0])
    assert results[0][1].calls == results[1][1].calls
    assert results[0][2] == results[1][2]
