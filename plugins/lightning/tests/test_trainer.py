"""The Trainer with Lightning's signature: arguments, attributes, subclasses, and its exchange in other packages."""

import gc
import inspect
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from lightning_models import dataset, fit, made, models, same
from torch.utils.data import DataLoader

from torchhal.errors import ConfigurationError
from torchhal_lightning import Trainer


def test_the_signatures_are_lightnings(pl):
    for name in ("__init__", "fit", "validate", "test", "predict"):
        theirs, mine = (inspect.signature(getattr(cls, name)).parameters for cls in (pl.Trainer, Trainer))
        assert list(mine) == list(theirs), name
        assert [each.default for each in mine.values()] == [each.default for each in theirs.values()], name


@pytest.mark.parametrize("name", ["Plain", "Scheduled", "Manual", "OwnHooks", "Everything", "WithMetric"])
def test_a_fit(pl, name):
    cls = models(pl)[name]
    theirs, mine = made(cls), made(cls)
    fit(pl.Trainer, theirs)
    trainer = fit(Trainer, mine)
    same(mine, theirs)
    assert mine.trainer is trainer


def test_the_default_callbacks_and_logger_are_lightnings(pl, tmp_path):
    found = []
    for number, trainer_of in enumerate((pl.Trainer, Trainer)):
        module = made(models(pl)["Plain"])
        folder = tmp_path / str(number)
        options = {"default_root_dir": folder, "logger": True, "enable_checkpointing": True, "max_epochs": 2}
        trainer = fit(trainer_of, module, **options)
        found.append((
            trainer.checkpoint_callback.best_model_path.replace(str(folder), ""),
            type(trainer.logger).__name__, str(trainer.log_dir).replace(str(folder), ""),
            trainer.state.fn, trainer.state.finished, trainer.current_epoch, trainer.global_step,
            type(module).load_from_checkpoint(trainer.checkpoint_callback.best_model_path).hparams.width,
        ))  # fmt: skip
    assert found[0] == found[1]


def test_a_subclass_has_attributes_of_its_own(pl):
    class Own(Trainer):
        def __init__(self, extra, **options):
            self.extra = extra
            super().__init__(**options)
            self.after = 2

        def fit(self, *args, **options):
            self.fits = getattr(self, "fits", 0) + 1
            super().fit(*args, **options)

    module = made(models(pl)["Plain"])
    trainer = fit(lambda **options: Own(1, **options), module, max_epochs=1)
    assert (trainer.extra, trainer.after, trainer.fits) == (1, 2, 1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(dataset(), 8))
    assert trainer.max_epochs == 2 and trainer.current_epoch == 2
    trainer.should_stop = True
    assert trainer.trainer.should_stop and not hasattr(trainer.trainer, "extra")


def test_words_and_arguments(pl):
    options = {"accelerator": "cpu", "devices": 1, "logger": False}
    assert Trainer(precision=64, **options).precision == "64-true"
    assert Trainer(precision="16-mixed", **options).precision == "bf16-mixed"
    assert Trainer(barebones=True, **options).checkpoint_callback is None
    with pytest.raises(ConfigurationError, match="'model_registry' has no counterpart"):
        Trainer(model_registry="mine", **options)


SCRIPT = """
import sys
import {tree} as pl
from {tree} import Trainer
from {tree}.callbacks import EarlyStopping
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = Trainer(max_epochs=2, accelerator="cpu", devices=int(sys.argv[1]), enable_progress_bar=False,
                      callbacks=[EarlyStopping("loss")])
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(16, 2)), 4))
    assert type(trainer.checkpoint_callback).__module__.startswith(pl.__name__)
    print("by", type(trainer).__module__, trainer.world_size, pl.Trainer is Trainer, trainer.global_rank)
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_a_script_runs_unchanged(pl, tmp_path, devices):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(tree=pl.__name__)))
    done = subprocess.run(
        [sys.executable, "-m", "torchhal_lightning", script.name, str(devices)], cwd=tmp_path, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(devices):
        assert f"by torchhal_lightning.trainer {devices} True {rank}" in done.stdout, done.stdout


def test_a_script_that_is_not_there(tmp_path):
    command = [sys.executable, "-m", "torchhal_lightning", str(tmp_path / "none.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "usage: python -m torchhal_lightning [--stand-in] script.py" in done.stderr


def test_steps_are_counted_from_predictions(pl):
    module = made(models(pl)["Plain"])
    module.forward = lambda batch: module.body(batch[0])
    trainer = fit(Trainer, module, max_epochs=1)
    assert len(torch.cat(trainer.predict(module, DataLoader(dataset(16, 9), 8)))) == 16


def test_a_trainer_that_nobody_keeps_is_freed(pl):
    module = made(models(pl)["Plain"])
    trainer = fit(Trainer, module, max_epochs=1)
    gone = weakref.ref(trainer), weakref.ref(trainer.trainer)
    assert module.trainer is trainer and module.current_epoch == 1
    del trainer, module
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_a_subclass_may_ask_before_it_is_made(pl):
    class Asks(Trainer):
        def __init__(self):
            self.before = getattr(self, "something", 3)
            super().__init__(accelerator="cpu", devices=1, logger=False)

    assert Asks().before == 3


def test_an_evaluation_without_a_model_takes_the_best_checkpoint(pl, tmp_path):
    results = []
    for number, trainer_of in enumerate((pl.Trainer, Trainer)):
        saver = pl.callbacks.ModelCheckpoint(tmp_path / str(number), monitor="val_loss")
        module = made(models(pl)["Plain"])
        trainer = fit(trainer_of, module, callbacks=[saver], enable_checkpointing=True)
        loader = DataLoader(dataset(24, 6), 8)
        with torch.no_grad():
            module.body[0].weight.zero_()
        first = trainer.test(dataloaders=loader, verbose=False)
        second = trainer.test(module, loader, ckpt_path="best", verbose=False)
        results.append((first[0], second[0]))
    assert results[0] == (pytest.approx(results[1][0]), pytest.approx(results[1][1]))
