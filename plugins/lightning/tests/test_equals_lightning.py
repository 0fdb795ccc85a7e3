"""A LightningModule does under torchhal's Trainer what it does under Lightning's: losses, metrics and hooks."""

import copy
import csv
import pickle
import time

import pytest
import torch
from lightning_models import dataset, fit, made, models, same
from torch.utils.data import DataLoader

import torchhal

NAMES = (
    "OwnLog", "Plain", "Scheduled", "Plateau", "Manual", "ManualOne", "OwnStep", "OwnHooks", "Skips", "Everything",
    "ClosureInside", "LogsEverywhere", "WithMetric",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_fit(pl, name):
    cls = models(pl)[name]
    theirs, mine = made(cls), made(cls)
    reference = fit(pl.Trainer, theirs)
    trainer = fit(torchhal.Trainer, mine)
    same(mine, theirs)
    assert {k: v.item() for k, v in trainer.callback_metrics.items()} == pytest.approx(
        {k: v.item() for k, v in reference.callback_metrics.items()}
    )
    for key, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[key], value), key


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"val_check_interval": 2},
        {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
        {"max_steps": 10},
        {"limit_train_batches": 3, "limit_val_batches": 1},
        {"fast_dev_run": True},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
    ],
    ids=str,
)
def test_arguments(pl, options):
    cls = models(pl)["Plain"]
    theirs, mine = made(cls), made(cls)
    fit(pl.Trainer, theirs, **options)
    fit(torchhal.Trainer, mine, **options)
    same(mine, theirs)


@pytest.mark.parametrize(
    "options", [{"val_check_interval": "00:00:00:04"}, {"val_check_interval": {"seconds": 7}, "max_epochs": 3}], ids=str
)
def test_validations_by_time(pl, options, monkeypatch):
    """A batch takes a second of a clock that only batches move, a validation three."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    class Timed(models(pl)["Plain"]):
        def training_step(self, batch, batch_idx):
            nonlocal now
            now += 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            nonlocal now
            now += 3
            return super().validation_step(batch, batch_idx)

    theirs, mine = made(Timed), made(Timed)
    fit(pl.Trainer, theirs, **options)
    fit(torchhal.Trainer, mine, **options)
    assert [note for note in theirs.notes if note[0] == "val"]
    same(mine, theirs)


def test_a_loss_in_double_precision(pl):
    """Hooks and metrics get the digits that the step has computed."""
    losses = []
    for trainer_of in (pl.Trainer, torchhal.Trainer):

        class Notes(models(pl)["Plain"]):
            def on_train_batch_end(self, outputs, batch, batch_idx):
                self.note("end", outputs["loss"].dtype, outputs["loss"])

        module = made(Notes)
        fit(trainer_of, module, precision="64-true", accumulate_grad_batches=3)
        losses.append([note for note in module.notes if note[0] in ("end", "train")])
    assert losses[0] == losses[1]


def test_evaluation_and_prediction(pl):
    cls = models(pl)["Plain"]
    results = []
    for trainer_of in (pl.Trainer, torchhal.Trainer):
        module = made(cls)
        module.forward = lambda batch, module=module: module.body(batch[0])
        trainer = fit(trainer_of, module)
        loader = DataLoader(dataset(16, 9), 8)
        validated = trainer.validate(module, loader, verbose=False)
        tested = trainer.test(module, loader, verbose=False)
        predicted = trainer.predict(module, loader)
        results.append((validated, tested, torch.cat(predicted).tolist()))
    assert results[0][0] == [pytest.approx(each) for each in results[1][0]]
    assert results[0][1] == [pytest.approx(each) for each in results[1][1]]
    assert results[0][2] == results[1][2]


def test_a_copy_made_in_a_run_has_lightnings_own_log(pl):
    class Copies(models(pl)["Plain"]):
        def on_train_epoch_end(self):
            self.copied = copy.deepcopy(self)
            self.pickled = pickle.loads(pickle.dumps(self.body))

    module = made(Copies)
    fit(torchhal.Trainer, module, max_epochs=1)
    assert "log" not in vars(module) and module.copied.log.__func__ is pl.LightningModule.log
    assert module.copied._trainer is None


def test_what_a_module_brings_and_steps_by(pl):
    """Callbacks of ``configure_callbacks`` log, and an optimizer is toggled through itself."""

    class Says(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            self.log("said", 2.0)

    class Brings(models(pl)["Manual"]):
        def configure_callbacks(self):
            return [Says()]

        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            with first.toggle_model():
                self.note([each.requires_grad for each in self.parameters()])
                loss = self.loss(batch)
                self.manual_backward(loss)
            first.step()
            first.zero_grad()
            self.note("train", loss)

    theirs, mine = made(Brings), made(Brings)
    reference, trainer = fit(pl.Trainer, theirs), fit(torchhal.Trainer, mine)
    same(mine, theirs, but=("epoch",))  # in which Lightning has what the callback logs a hook earlier
    assert float(trainer.callback_metrics["said"]) == float(reference.callback_metrics["said"]) == 2.0
    assert copy.deepcopy(mine).body[0].weight.equal(mine.body[0].weight)


class ShufflesItself:
    """A loader that is no DataLoader: each iterator has an order of its own."""

    def __init__(self, size):
        self._data = dataset(size)

    def __len__(self):
        return len(self._data) // 8

    def __iter__(self):
        order = torch.randperm(len(self._data))
        return iter([self._data[order[start : start + 8]] for start in range(0, len(self._data), 8)])


@pytest.mark.parametrize("kind", ["generator", "own"])
def test_loaders_with_an_order_of_their_own(pl, kind):
    def loader(size):
        if kind == "own":
            return ShufflesItself(size)
        return DataLoader(dataset(size), 8, shuffle=True, generator=torch.Generator().manual_seed(2))

    def run(trainer_of, module):
        torch.manual_seed(1)
        trainer = trainer_of(
            accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader(48), loader(24))

    theirs, mine = made(models(pl)["Plain"]), made(models(pl)["Plain"])
    run(pl.Trainer, theirs)
    run(torchhal.Trainer, mine)
    del mine.notes[:2], theirs.notes[:2]  # of the sanity check, before which Lightning begins the loader once more
    same(mine, theirs)


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 1, "accumulate_grad_batches": 4}], ids=str)
def test_gradients_are_cleared_before_a_validation(pl, options):
    class Keeps(models(pl)["Plain"]):
        def on_validation_model_zero_grad(self):
            self.note("cleared", self.global_step)

    theirs, mine = made(Keeps), made(Keeps)
    fit(pl.Trainer, theirs, **options)
    fit(torchhal.Trainer, mine, **options)
    same(mine, theirs)
    assert any(note[0] == "cleared" for note in mine.notes) and "on_validation_model_eval" not in vars(mine)


def test_a_step_of_ones_own(pl, tmp_path):
    """What is logged as "step" is the loggers' axis."""

    class ByEpoch(models(pl)["Plain"]):
        def on_train_epoch_end(self):
            self.log("step", 100.0 + self.current_epoch)
            self.log("mine", 1.0)

    for number, trainer_of in enumerate((pl.Trainer, torchhal.Trainer)):
        logger = pl.loggers.CSVLogger(tmp_path / str(number), name="", version=0)
        fit(trainer_of, made(ByEpoch), logger=logger)
        with open(tmp_path / str(number) / "version_0" / "metrics.csv") as file:
            rows = [row for row in csv.DictReader(file) if row["mine"]]
        assert [row["step"] for row in rows] == ["100", "101", "102"]


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_that_are_made_anew(pl, workers):
    class Makes(models(pl)["Plain"]):
        def train_dataloader(self):
            return DataLoader(dataset(), 8, shuffle=True, num_workers=workers)

        def val_dataloader(self):
            return DataLoader(dataset(24, 6), 8)

    theirs, mine = made(Makes), made(Makes)
    for trainer_of, module in ((pl.Trainer, theirs), (torchhal.Trainer, mine)):
        torch.manual_seed(1)
        trainer = trainer_of(
            accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, reload_dataloaders_every_n_epochs=1,
        )  # fmt: skip
        trainer.fit(module)
    same(mine, theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Plain", {"log_every_n_steps": 2}),
        ("Plain", {"log_every_n_steps": 1, "accumulate_grad_batches": 2, "val_check_interval": 2}),
        ("Manual", {"log_every_n_steps": 2}),
    ],
    ids=str,
)
def test_steps_of_what_is_logged(pl, tmp_path, name, options):
    tables = []
    for number, trainer_of in enumerate((pl.Trainer, torchhal.Trainer)):
        logger = pl.loggers.CSVLogger(tmp_path / str(number), name="", version=0)
        module = made(models(pl)[name])
        trainer = fit(trainer_of, module, logger=logger, **options)
        trainer.test(module, DataLoader(dataset(16, 9), 8), verbose=False)
        with open(tmp_path / str(number) / "version_0" / "metrics.csv") as file:
            tables.append({(row["step"], key) for row in csv.DictReader(file) for key, value in row.items() if value})
    assert tables[1] == tables[0]


@pytest.mark.parametrize(
    ("asked", "options"),
    [(True, {}), (True, {"min_steps": 9}), (False, {"max_time": {"microseconds": 1}})],
    ids=str,
)
def test_a_stop_inside_of_an_epoch(pl, tmp_path, asked, options):
    """It validates once more, so that a ModelCheckpoint with a monitor saves."""

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if asked and trainer.global_step == 3:
                trainer.should_stop = True

    found = []
    for number, trainer_of in enumerate((pl.Trainer, torchhal.Trainer)):
        folder, module = tmp_path / str(number), made(models(pl)["Plain"])
        callbacks = [Stops(), pl.callbacks.ModelCheckpoint(folder, monitor="val_loss")]
        trainer = fit(trainer_of, module, callbacks=callbacks, enable_checkpointing=True, **options)
        notes = [note for note in module.notes if note[0] != "epoch"]
        found.append((notes, trainer.global_step, [path.name for path in folder.iterdir()]))
    assert found[1] == found[0] and found[1][2]
