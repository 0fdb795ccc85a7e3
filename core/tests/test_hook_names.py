"""Methods that no Trainer calls: removed hooks are refused by name, near misses are said, users' own are let be."""

import types
import warnings

import pytest
import torch
from torch import nn

from torchhal import Callback, DataModule, Module, Trainer
from torchhal.errors import ModelError


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(DataModule):
    def train_dataloader(self):
        return [torch.ones(2, 1)]


def method(self, *args, **kwargs):
    raise AssertionError("called")


def having(base, name):
    return type(base.__name__, (base,), {name: method})()


def fit(model=None, data=None, callback=None, **options):
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callback, **options,
    )  # fmt: skip
    trainer.fit(model or Net(), datamodule=data or Data())


REMOVED = [
    ("training_epoch_end", "on_train_epoch_end"),
    ("validation_epoch_end", "on_validation_epoch_end"),
    ("test_epoch_end", "on_test_epoch_end"),
    ("training_step_end", "on_train_batch_end"),
    ("on_epoch_end", "on_train_epoch_end"),
    ("on_batch_start", "on_train_batch_start"),
    ("configure_sharded_model", "configure_model"),
    ("on_train_dataloader", "train_dataloader"),
    ("tbptt_split_batch", "automatic_optimization"),
]


@pytest.mark.parametrize(("name", "instead"), REMOVED)
def test_a_removed_hook_of_a_model_is_refused_by_name(name, instead):
    with pytest.raises(ModelError, match=rf"Net\.{name} is no hook any more.*use .*{instead}"):
        fit(having(Net, name))


@pytest.mark.parametrize("name", ["on_epoch_start", "on_batch_end", "on_init_start", "on_keyboard_interrupt"])
def test_a_removed_hook_of_a_callback_is_refused_by_name(name):
    with pytest.raises(ModelError, match=rf"Callback\.{name} is no hook any more"):
        fit(callback=having(Callback, name))

    class Brings(Net):
        def configure_callbacks(self):
            return having(Callback, name)

    with pytest.raises(ModelError, match=rf"Callback\.{name} is no hook any more"):
        fit(Brings())


def test_a_removed_hook_on_the_object_or_of_a_plain_module_or_of_a_data_module():
    model = Net()
    model.training_epoch_end = types.MethodType(method, model)
    with pytest.raises(ModelError, match="training_epoch_end"):
        fit(model)

    class Plain(nn.Linear):
        def training_step(self, batch, batch_idx):
            return self(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_epoch_end(self, outputs):
            pass

    with pytest.raises(ModelError, match=r"Plain\.training_epoch_end"):
        fit(Plain(1, 1))
    with pytest.raises(ModelError, match=r"Data\.on_train_dataloader"):
        fit(data=having(Data, "on_train_dataloader"))


def test_optimizer_idx_is_refused():
    class Two(Net):
        def training_step(self, batch, batch_idx, optimizer_idx):
            return super().training_step(batch, batch_idx)

    with pytest.raises(ModelError, match=r"Two\.training_step takes 'optimizer_idx'.*automatic_optimization = False"):
        fit(Two())


NEAR = [
    (Net, "on_train_epoch_ends", "on_train_epoch_end"),
    (Net, "on_training_epoch_end", "on_train_epoch_end"),
    (Net, "on_val_batch_end", "on_validation_batch_end"),
    (Net, "on_train_begin", "on_train_start"),
    (Net, "on_after_backwards", "on_after_backward"),
    (Net, "on_before_optimizer_steps", "on_before_optimizer_step"),
    (Net, "val_step", "validation_step"),
    (Net, "valid_step", "validation_step"),
    (Net, "prediction_step", "predict_step"),
    (Net, "validation_stepp", None),
    (Net, "train_epoch_end", "on_train_epoch_end"),
    (Net, "validation_dataloader", "val_dataloader"),
    (Callback, "on_train_epoch_ends", "on_train_epoch_end"),
    (Callback, "on_training_batch_end", "on_train_batch_end"),
    (Callback, "on_train_step_end", "on_train_batch_end"),
    (Data, "training_dataloader", None),
    (Data, "validation_dataloader", "val_dataloader"),
    (Data, "on_after_batch_transfers", "on_after_batch_transfer"),
]


@pytest.mark.parametrize(("base", "name", "meant"), NEAR)
def test_a_near_miss_is_said_and_the_run_goes_on(base, name, meant):
    owner = having(base, name)
    given = {{Net: "model", Data: "data", Callback: "callback"}[base]: owner}
    if meant is None:  # named like no hook, or one that is there too
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit(**given)
        return
    with pytest.warns(UserWarning, match=rf"{base.__name__}\.{name} is no hook.*did you mean {meant}\?"):
        fit(**given)


def test_a_hook_of_another_owner_is_said():
    with pytest.warns(
        UserWarning, match=r"Data\.on_train_epoch_end is a hook of models and callbacks, and the Trainer"
    ):
        fit(data=having(Data, "on_train_epoch_end"))


@pytest.mark.parametrize(
    "name",
    [
        "model_step", "shared_step", "common_step", "eval_step", "train_step", "generator_step", "step", "forward_step",
        "make_dataloader", "get_dataloader", "build_dataloader", "epoch_end", "on_new_best", "on_click", "onwards",
        "log_epoch_end", "pre_step",
    ],
)  # fmt: skip
def test_users_own_methods_are_no_false_alarm(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(having(Net, name), having(Data, name), having(Callback, name))
