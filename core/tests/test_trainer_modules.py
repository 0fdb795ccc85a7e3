"""Test modules and data modules as objects: as arguments, copied, scripted, and with callbacks of their own."""

import copy
import io
import os
import pickle

import hardware
import pytest
import torch
from full_net import Data, Net, batches, fit
from quiet_trainer import make
from torch import nn

from torchhal import Callback, Module, Trainer
from torchhal.errors import (
    ConfigurationError,
)
from torchhal.trainer.callbacks import EarlyStopping, ModelCheckpoint

pytestmark = pytest.mark.usefixtures("accelerator")


def test_data_module_argument():
    """A data module is taken by position and by name, and not beside loaders."""
    data = Data()
    trainer = make()
    trainer.fit(Net(), data)
    assert trainer.datamodule is data and trainer.global_step == 2
    assert data.calls == [("prepare", "fit"), ("setup", "fit", True, False), ("teardown", "fit")]
    data.calls.clear()
    trainer.test(datamodule=data, verbose=False)
    assert data.calls == [("prepare", "test"), ("setup", "test", False, True), ("teardown", "test")]
    assert len(trainer.predict(Net(), data)) == len(trainer.predict(Net(), datamodule=data)) == 2
    assert trainer.validate(Net(), data, verbose=False)[0].keys() == {"val_loss"}
    for call in (
        lambda: trainer.fit(Net(), data, datamodule=data),
        lambda: trainer.fit(Net(), batches(), datamodule=data),
        lambda: trainer.fit(Net(), val_dataloaders=batches(), datamodule=data),
        lambda: trainer.test(Net(), batches(), datamodule=data),
        lambda: trainer.validate(Net(), data, datamodule=data),
    ):
        with pytest.raises(ConfigurationError, match=r"and 'datamodule' both give data: pass one of them"):
            call()


def test_copies_have_no_trainer():
    """A copy of a module or data module leaves the Trainer behind."""
    data, model = Data(), Net()
    trainer = make()
    trainer.fit(model, data)
    assert model.trainer is trainer and data.trainer is trainer
    for copied in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match="Net is not attached to a Trainer"):
            _ = copied.trainer
        assert torch.equal(copied.layer.weight, model.layer.weight)
    assert copy.deepcopy(data).trainer is None and pickle.loads(pickle.dumps(data)).trainer is None
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert len(buffer.getvalue()) < 20_000


class Scripted(Module):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = True
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    @property
    def width(self) -> int:  # the user's own, which torch.jit compiles
        return self.body[0].out_features

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Derived(Scripted):
    pass


@pytest.mark.one_accelerator
@pytest.mark.parametrize("kind", [Scripted, Derived])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_jit_takes_a_module(kind, tmp_path):
    """Before and after it was trained: what a Module adds to an nn.Module is no part of its forward."""
    model, x = kind(), torch.randn(5, 4)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for trained in (False, True):
        if trained:
            Trainer(accelerator="cpu", max_epochs=1, **options).fit(model.train(), [torch.randn(8, 4)] * 2)
        model.eval()
        torch.jit.script(model).save(tmp_path / "scripted.pt")
        loaded = torch.jit.load(tmp_path / "scripted.pt")
        assert torch.equal(loaded(x), model(x))
        assert torch.equal(torch.jit.trace(model, x)(x), model(x))


def test_callbacks_of_the_model():
    class Own(Net):
        def configure_callbacks(self):
            self.asked = getattr(self, "asked", 0) + 1
            return [EarlyStopping("val_loss", patience=7), Note()]

    class Note(Callback):
        fits = 0

        def on_fit_start(self, trainer, module):
            self.fits += 1

    given, other = EarlyStopping("other", strict=False), Callback()
    model = Own()
    trainer, _ = fit(model, None, batches(1), given, other)
    assert given not in trainer.callbacks and other in trainer.callbacks
    assert trainer.early_stopping_callback.patience == 7
    kept = trainer.early_stopping_callback
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches(), batches(1))
    assert trainer.early_stopping_callback is kept and model.asked == 1  # and so it still knows what it saw
    assert [callback.fits for callback in trainer.callbacks if isinstance(callback, Note)] == [2]


def test_checkpoint_of_model_without_checkpointing(tmp_path):
    """A ModelCheckpoint of the model is used with a warning where checkpointing is off."""

    class Keeps(Net):
        def configure_callbacks(self):
            return ModelCheckpoint(tmp_path)

    with pytest.warns(UserWarning, match="False, but Keeps.configure_callbacks returned a ModelCheckpoint"):
        fit(Keeps())
    assert os.listdir(tmp_path)


def test_best_with_checkpoint_of_model(tmp_path):
    """ckpt_path="best" is known when the model brought the ModelCheckpoint."""

    class Own(Net):
        def configure_callbacks(self):
            return ModelCheckpoint(tmp_path)

    trainer, model = fit(Own())
    best = trainer.checkpoint_callback.best_model_path
    trainer.test(model, batches(1), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == best == trainer.checkpoint_callback.best_model_path


def test_a_subclass_of_trainer():
    class Mine(Trainer):
        def __init__(self, *, flavour="plain", **options):
            super().__init__(**options)
            self.flavour = flavour
            self._model = None

        def fit(self, *args, **kwargs):
            self._model = kwargs.get("model", args[0] if args else None)
            return super().fit(*args, **kwargs)

    trainer = Mine(flavour="sweet", accelerator=hardware.name(), devices=1, max_epochs=1, logger=False,
                   enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    model = Net()
    trainer.extra = 5
    trainer.fit(model=model, train_dataloaders=batches())
    assert trainer._model is model and (trainer.flavour, trainer.extra, trainer.global_step) == ("sweet", 5, 2)
