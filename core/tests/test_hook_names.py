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
def test_removed_model_hook_refused(name, instead):
    """A removed hook of a model is refused by name."""
    with pytest.raises(ModelError, match=rf"Net\.{name} is no hook any more.*use .*{instead}"):
        fit(having(Net, name))


@pytest.mark.parametrize("name", ["on_epoch_start", "on_batch_end", "on_init_start", "on_keyboard_interrupt"])
def test_removed_callback_hook_refused(name):
    """A removed hook of a callback is refused by name."""
    with pytest.raises(ModelError, match=rf"Callback\.{name} is no hook any more"):
        fit(callback=having(Callback, name))

    class Brings(Net):
        def configure_callbacks(self):
            return having(Callback, name)

    with pytest.raises(ModelError, match=rf"Callback\.{name} is no hook any more"):
        fit(Brings())


def test_removed_hook_on_other_owners():
    """A removed hook is refused on an object, a plain module and a data module, too."""
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


@pytest.mark.parametrize("hook", ["optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward"])
def test_optimizer_idx_is_refused_in_every_hook(hook):
    def old(self, one, two, three, optimizer_idx=0, closure=None):
        raise AssertionError("called")

    with pytest.raises(ModelError, match=rf"Net\.{hook} takes 'optimizer_idx', which no Trainer gives"):
        fit(type("Net", (Net,), {hook: old})())


@pytest.mark.parametrize(
    ("base", "name", "says"),
    [
        (
            Net,
            "on_train_batch_end",
            r"must take \(self, outputs, batch, batch_idx\).*is defined as .*",
        ),
        (Net, "on_validation_batch_end", r"must take \(self, outputs, batch, batch_idx, dataloader_idx\)"),
        (Net, "setup", r"must take \(self, stage\)"),
        (Net, "configure_optimizers", r"must take \(self\)"),
        (Net, "train_dataloader", r"must take \(self\)"),
        (Callback, "on_train_epoch_end", r"must take \(self, trainer, module\)"),
        (Callback, "on_train_batch_start", r"must take \(self, trainer, module, batch, batch_idx\)"),
    ],
)
def test_uncallable_hook_refused(base, name, says):
    """A hook that can't be called with its arguments is refused."""
    takes = (lambda self, lr: None) if says.endswith(r"\(self\)") else lambda self: None
    owner = type(base.__name__, (base,), {name: takes})()
    with pytest.raises(ModelError, match=rf"{base.__name__}\.{name} {says}"):
        fit(**{{Net: "model", Callback: "callback"}[base]: owner})


def test_hook_signatures_may_vary():
    """A hook may leave out dataloader_idx and add parameters with a default."""

    class Own(Net):
        def setup(self, stage=None): ...
        def on_validation_batch_end(self, outputs, batch, batch_idx): ...
        def on_train_batch_end(self, outputs, batch, batch_idx, unused=0): ...
        def on_test_batch_end(self, outputs, batch, *, dataloader_idx=0, **others): ...
        def on_predict_batch_end(self, *args): ...

    with pytest.raises(ModelError, match=r"Own\.on_test_batch_end must take"):
        fit(Own())
    del Own.on_test_batch_end

    class OwnData(Data):
        def setup(self, stage): ...

    class OwnCallback(Callback):
        def setup(self, trainer, module, stage): ...

    fit(Own(), OwnData(), OwnCallback())


@pytest.mark.parametrize(
    ("wrong", "right"), [("train_step", "training_step"), ("configure_optimizer", "configure_optimizers")]
)
def test_misnamed_step_is_suggested(wrong, right):
    """The error for a missing step names one that is nearly its name."""
    with pytest.raises(ModelError, match=rf"it has no {right} \(its {wrong} is no hook"):
        fit(type("Net", (Net,), {wrong: method, right: None})())


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
    (Net, "on_before_optim_step", "on_before_optimizer_step"),
    (Net, "optimizer_steps", "optimizer_step"),
    (Net, "transfer_batch_to_devices", "transfer_batch_to_device"),
    (Callback, "setups", "setup"),
    (Callback, "set_up", "setup"),
    (Callback, "state_dicts", "state_dict"),
    (Data, "setUp", "setup"),
    (Data, "prepare_datas", "prepare_data"),
    (Callback, "on_train_epoch_ends", "on_train_epoch_end"),
    (Callback, "on_training_batch_end", "on_train_batch_end"),
    (Callback, "on_train_step_end", "on_train_batch_end"),
    (Data, "training_dataloader", None),
    (Data, "validation_dataloader", "val_dataloader"),
    (Data, "on_after_batch_transfers", "on_after_batch_transfer"),
]


@pytest.mark.parametrize(("base", "name", "meant"), NEAR)
def test_misspelled_hook_warns(base, name, meant):
    """A method that is nearly a hook's name is a warning, and the run goes on."""
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
