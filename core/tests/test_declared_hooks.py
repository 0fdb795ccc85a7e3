"""Base classes that name every hook, step and loader for others to define: what is inherited from them is missing."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, Module, Trainer
from torchhal._overrides import _DECLARING, declares_hooks, implements
from torchhal.errors import ModelError


def _raises(name):
    def body(*args, **kwargs):
        raise AssertionError(f"{name} was called, and nobody has defined it")

    return body


NAMES = [
    "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "train_dataloader",
    "val_dataloader", "test_dataloader", "predict_dataloader", "prepare_data", "setup", "teardown", "configure_model",
    "configure_callbacks", "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end",
    "on_train_epoch_end", "on_validation_epoch_end", "on_validation_model_eval", "on_validation_model_train",
    "on_test_model_eval", "on_save_checkpoint", "on_load_checkpoint", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping",
    "lr_scheduler_step", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "on_exception", "on_epoch_end",
]  # fmt: skip

Everything = type("Everything", (), {name: _raises(name) for name in NAMES})


@pytest.fixture(autouse=True)
def declared():
    """Everything is known as a base class of another library's for the time of a test."""
    declares_hooks(Everything)
    yield
    _DECLARING.pop(Everything, None)


class Line(Everything, nn.Linear):
    """A model of that library's: two methods and no more."""

    def __init__(self):
        super().__init__(2, 1)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Said(Everything):
    """A callback of that library's with one hook."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1


LOADER = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_what_a_base_class_declares_is_never_called(tmp_path):
    said = Said()
    trainer = Trainer(**QUIET, max_epochs=2, gradient_clip_val=1.0, callbacks=[said], default_root_dir=tmp_path)
    trainer.fit(Line(), LOADER, LOADER)  # of which the second has no use without a validation_step
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert said.steps == 4
    again = Trainer(**QUIET, max_epochs=3, callbacks=[Said()], default_root_dir=tmp_path)
    again.fit(Line(), LOADER, ckpt_path=tmp_path / "last.ckpt")
    assert again.global_step == 6


class Data(Everything):
    def train_dataloader(self):
        return LOADER


def test_a_data_module_gives_the_loaders_that_it_defines(tmp_path):
    trainer = Trainer(**QUIET, max_epochs=1, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.fit(Line(), datamodule=Data())
    assert trainer.global_step == 2
    with pytest.raises(ModelError, match="'datamodule' must be a DataModule, or have one of"):
        trainer.fit(Line(), datamodule=Everything())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda trainer, model: trainer.validate(model, LOADER), "Line has no validation_step"),
        (lambda trainer, model: trainer.test(model), "test needs data"),
        (lambda trainer, model: trainer.predict(model, LOADER), "Line has no predict_step"),
    ],
)
def test_a_step_or_loader_that_a_base_class_declares_is_missing(call, said, tmp_path):
    with pytest.raises(ModelError, match=said):
        call(Trainer(**QUIET, default_root_dir=tmp_path), Line())


def test_implements():
    model, callback, own = Line(), Callback(), Module()
    assert implements(model, "training_step") and not implements(model, "validation_step")
    model.validation_step = lambda batch, batch_idx: None
    assert implements(model, "validation_step")
    assert not implements(callback, "on_train_start") and not implements(own, "on_train_start")
    assert not implements(None, "setup") and not implements(model, "no_such_hook")
    assert implements(model, "forward")

    class Back(type(own)):
        """Takes the base class's body back from a parent."""

        on_train_start = Module.on_train_start
        on_train_end = None

    assert not implements(Back(), "on_train_start") and not implements(Back(), "on_train_end")


def test_subclasses_of_a_class_that_declares_hooks_implement_theirs():
    class Half(Everything):
        def setup(self, stage): ...

    assert implements(type("Whole", (Half,), {})(), "setup")
