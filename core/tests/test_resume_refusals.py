"""A run continues from what a run has saved, or says which field of which file it can't continue from."""

import copy
import inspect
import math
import random
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Callback, EarlyStopping, ModelCheckpoint, Module, Trainer
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, TorchhalError
from torchhal.strategies import Strategy
from torchhal.strategies._optimizer_state import check_optimizer_state, check_scheduler_state
from torchhal.trainer._callback_states import callback_states
from torchhal.trainer._checkpointing import read_checkpoint
from torchhal.trainer.adapters import run_of


class Net(Module):
    def __init__(self, optimizer="Adam", groups=2, scheduler="StepLR", reverse=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2), nn.Linear(3, 3))
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.made = optimizer, groups, scheduler, reverse

    def training_step(self, batch, batch_idx):
        loss = self.body(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.body(batch).square().mean())

    def configure_optimizers(self):
        kind, groups, scheduler, reverse = self.made
        parameters = [list(self.body[0].parameters()), list(self.body[2].parameters())]
        given = [{"params": each} for each in (reversed(parameters) if reverse else parameters)]
        given = given if groups == 2 else [{"params": parameters[0] + parameters[1]}]
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(given, lr=0.05, **options)
        schedulers = {
            "StepLR": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
            "CosineAnnealingLR": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        }
        return [optimizer], [{"scheduler": schedulers[scheduler](), "interval": "step"}] if scheduler else []


DATA = torch.arange(96.0).reshape(24, 4) / 96


def data():
    return DataLoader(DATA, 4, shuffle=True)


def fit(model, folder=None, callbacks=(), ckpt_path=None, loader=None, **options):
    options = {
        "max_steps": 6, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0,
        "enable_checkpointing": folder is not None, **options,
    }  # fmt: skip
    if folder is not None:
        callbacks = [ModelCheckpoint(folder, monitor="val_loss"), EarlyStopping("val_loss", patience=99), *callbacks]
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(model, data() if loader is None else loader, DataLoader(DATA[:4], 4), ckpt_path=ckpt_path)
    return trainer


class Save(Callback):
    """Saves after a batch."""

    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batches == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.fixture
def saved(tmp_path):
    """Of the second epoch's third batch, in the midst of an accumulation."""
    torch.manual_seed(1)
    random.seed(1)
    fit(Net(), tmp_path / "kept", [Save(tmp_path / "x.ckpt", 9)])
    return tmp_path / "x.ckpt"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "Rprop", "SGD")),
        *(("Adam", {"amsgrad": amsgrad}) for amsgrad in (False, True)),
        *(("RMSprop", {"momentum": 0.9, "centered": centered}) for centered in (False, True)),
        ("Adafactor", {}), ("AdamW", {}), ("SGD", {"momentum": 0.9}), ("SparseAdam", {}),
    ],
)  # fmt: skip
def test_own_state_of_torch_optimizers(name, options):
    """The state of each of torch's optimizers is accepted as its own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(1, 2, 3), nn.LayerNorm(()))
    parameters = list(model.parameters())
    optimizer = getattr(torch.optim, name)(parameters, **options)
    for parameter in parameters[:-1]:  # one that got no gradient
        parameter.grad = torch.ones_like(parameter)
        if name == "SparseAdam":
            parameter.grad = parameter.grad.to_sparse()
    optimizer.step(lambda: sum(parameter.square().sum() for parameter in parameters))
    check_optimizer_state(optimizer, optimizer.state_dict())


def adam_with_a_hook(hook):
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2, 3))])
    optimizer.param_groups[0]["bias_correction"] = True  # as optimizers of vendors have, and torch's states lack
    optimizer.register_load_state_dict_pre_hook(hook)
    return optimizer


def state_of_torch():
    optimizer = torch.optim.Adam([parameter := nn.Parameter(torch.ones(2, 3))])
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    return optimizer.state_dict()


def test_state_checked_after_load_hooks():
    """A state is checked as the optimizer's hooks of a load make it."""

    def convert(optimizer, state):
        state["param_groups"][0]["bias_correction"] = True  # in place, as torch allows

    optimizer, state = adam_with_a_hook(convert), state_of_torch()
    before = copy.deepcopy(state["param_groups"])
    check_optimizer_state(optimizer, state)
    assert state["param_groups"] == before
    state["state"][0]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointMismatchError, match="'exp_avg' of parameter 0 has the shape"):
        check_optimizer_state(optimizer, state)


def test_a_hook_that_raises_is_named():
    def convert(optimizer, state):
        raise KeyError("moments")

    with pytest.raises(CheckpointMismatchError, match=r"Adam: its hook .*convert.* raised KeyError: 'moments'"):
        check_optimizer_state(adam_with_a_hook(convert), state_of_torch())


def test_optimizer_with_own_loading():
    """An optimizer that loads by itself takes the states that it can convert."""

    class Converting(torch.optim.Adam):
        def load_state_dict(self, state_dict):
            groups = [{**group, "scale": group.get("scale", 1.0)} for group in state_dict["param_groups"]]
            super().load_state_dict({**state_dict, "param_groups": groups})

    optimizer = Converting([nn.Parameter(torch.ones(2, 3))])
    optimizer.param_groups[0]["scale"] = 2.0
    check_optimizer_state(optimizer, state_of_torch())
    optimizer.load_state_dict(state_of_torch())
    with pytest.raises(CheckpointMismatchError, match="its groups hold"):
        check_optimizer_state(optimizer, {"state": {}, "param_groups": [{"params": [0, 1]}]})


@contextmanager
def unchanged(model, *callbacks):
    """What is refused inside leaves the weights, a new optimizer and the callbacks as they were."""

    def now():
        return copy.deepcopy([model.state_dict(), *(callback.state_dict() for callback in callbacks)])

    before, make = now(), model.configure_optimizers
    made = []
    model.configure_optimizers = lambda: made.append(make()) or made[-1]
    yield
    for (name, value), other in zip(model.state_dict().items(), before[0].values(), strict=True):
        assert torch.equal(value, other), f"{name} was loaded before the refusal"
    assert now()[1:] == before[1:]
    (((optimizer,), configs),) = made
    fresh = make()
    assert optimizer.state_dict() == fresh[0][0].state_dict()
    for config, other in zip(configs, fresh[1], strict=True):
        assert config["scheduler"].state_dict() == other["scheduler"].state_dict()


def reordered():
    """The parameters of each group come in another order."""
    model = Net()
    make = model.configure_optimizers

    def configure_optimizers():
        made = make()
        for group in made[0][0].param_groups:
            group["params"].reverse()
        return made

    model.configure_optimizers = configure_optimizers
    return model


# -- other optimizers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Net("AdamW"), "holds the state of the optimizer.s. Adam, but configure_optimizers returned AdamW"),
        (Net("SGD"), "holds the state of the optimizer.s. Adam, but configure_optimizers returned SGD"),
        (Net(reverse=True), "of parameter 'body.2.weight' in group 1 of optimizer 0, but .* group 0 of optimizer 0"),
        (Net(groups=1), "of parameter 'body.2.weight' in group 1 of optimizer 0, but .* group 0 of optimizer 0"),
        (reordered(), "holds the state of the parameters .* gives them in the order .*a set has none"),
        (Net(scheduler="CosineAnnealingLR"), "lr_scheduler.s. StepLR, but .* returned CosineAnnealingLR"),
        (
            Net(scheduler=None),
            "holds the state of 1 lr_scheduler.s. in its field .lr_schedulers., but .* returned 0",
        ),
    ],
)
def test_misplaced_state_refused(saved, model, says):
    """A state goes only to the optimizer, group and scheduler that it came from."""
    with unchanged(model), pytest.raises(CheckpointMismatchError, match=says) as caught:
        fit(model, ckpt_path=saved)
    assert str(saved) in str(caught.value)


def two_schedulers(*kinds, inside=False):
    """Two optimizers with a scheduler each, or one scheduler that holds both."""
    model = Net()
    model.automatic_optimization = False

    def training_step(batch, batch_idx):
        model.body(batch).square().mean().backward()
        for optimizer in model.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers():
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.body[0], model.body[2])]
        schedule = {
            "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
            "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        }
        if inside:
            held = [schedule[kind](optimizers[0]) for kind in kinds]
            return optimizers, [torch.optim.lr_scheduler.SequentialLR(optimizers[0], held, [2])]
        numbered = [int(kind[-1]) for kind in kinds]
        return optimizers, [schedule["step"](optimizers[number]) for number in numbered]

    model.training_step, model.configure_optimizers = training_step, configure_optimizers
    return model


@pytest.mark.parametrize(
    ("before", "here", "inside", "says"),
    [
        (("of 0", "of 1"), ("of 1", "of 0"), False, r"\(s\) StepLR of optimizer 0, StepLR of optimizer 1, but"),
        (("step", "cosine"), ("cosine", "step"), True, r"\(s\) SequentialLR\(StepLR, CosineAnnealingLR\) of opti"),
    ],
)
def test_scheduler_state_follows_optimizer(tmp_path, before, here, inside, says):
    """A scheduler's state goes to the scheduler of its optimizer."""
    path = tmp_path / "x.ckpt"
    options = {"accumulate_grad_batches": 1}
    fit(two_schedulers(*before, inside=inside), callbacks=[Save(path, 3)], **options)
    fit(two_schedulers(*before, inside=inside), ckpt_path=path, **options, max_steps=14)
    with pytest.raises(CheckpointMismatchError, match=says):
        fit(two_schedulers(*here, inside=inside), ckpt_path=path, **options)
    checkpoint = torch.load(path, weights_only=True)
    outer = ["SequentialLR"] if inside else ["StepLR"] * 2
    checkpoint["trained_by"]["lr_schedulers"] = outer
    del checkpoint["digests"]
    torch.save(checkpoint, path)
    fit(two_schedulers(*before, inside=inside), ckpt_path=path, **options, max_steps=14)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state["state"][0].update(exp_avg=torch.zeros(2, 2)), "'exp_avg' of parameter 0 has the shape"),
        (lambda state: state["param_groups"][0].update(betas=0.9), "group 0 has betas=0.9, and here"),
        (lambda state: state["param_groups"][1].update(lr="much"), "group 1 has lr='much', and here"),
        (lambda state: state["param_groups"][1].update(lr=math.nan), "group 1 has lr=nan"),
        (lambda state: state["param_groups"][0].pop("eps"), "group 0 lacks 'eps'"),
        (lambda state: state["param_groups"][0]["params"].append(7), "its groups hold .3, 2. parameters"),
        (lambda state: state["state"].update({9: {}}), "it has parameter 9, and there are 4 here"),
        (
            lambda state: state["param_groups"][1].update(betas=(0.9, -1.999)),
            "group 1 has options that it doesn't take: Invalid beta parameter at index 1: -1.999",
        ),
        (lambda state: state.pop("state"), "it has no 'state'"),
        (lambda state: state.pop("param_groups"), "it has no 'param_groups'"),
    ],
)
def test_unusable_state_refused(saved, change, says):
    """A state that no step could use is refused before one."""
    checkpoint = torch.load(saved, weights_only=True)
    del checkpoint["digests"]
    change(checkpoint["optimizer_states"][0])
    torch.save(checkpoint, saved)
    model, stopping = Net(), EarlyStopping("val_loss", patience=99)
    with unchanged(model, stopping), pytest.raises(CheckpointMismatchError, match=says) as caught:
        fit(model, callbacks=[stopping], ckpt_path=saved)
    assert "optimizer_states/0" in str(caught.value)


def test_a_parameter_that_lost_its_state_is_named(saved):
    checkpoint = torch.load(saved, weights_only=True)
    del checkpoint["optimizer_states"][0]["state"][1], checkpoint["digests"]
    torch.save(checkpoint, saved)
    with pytest.warns(UserWarning, match="'optimizer_states/0': it has no state of the parameters numbered 1, which"):
        assert fit(Net(), ckpt_path=saved, max_steps=5).global_step == 5


class Recording(torch.optim.lr_scheduler.LRScheduler):
    """Keeps what a new one doesn't have yet."""

    def __init__(self, optimizer, warmup: int = 2):
        self.warmup, self.history, self.phase, self.best = warmup, [], None, None
        super().__init__(optimizer)

    def get_lr(self):
        self.history.append(self.last_epoch)
        self.phase = self.best = "warm" if self.last_epoch < self.warmup else "cold"
        return self.base_lrs


def test_what_a_users_scheduler_keeps_may_grow():
    def make():
        return Recording(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))

    used, new = make(), make()
    used.optimizer.step()
    used.step()
    new.phase, state = None, used.state_dict()
    check_scheduler_state(new, state)
    for name, value in (("base_lrs", [0.1, 0.1]), ("warmup", 1.5), ("last_epoch", "one"), ("history", 3)):
        with pytest.raises(CheckpointMismatchError, match=f"to this Recording: it has {name}="):
            check_scheduler_state(new, {**state, name: value})


@pytest.mark.parametrize(("name", "value"), [("gamma", "half"), ("step_size", 1.5), ("last_epoch", 2.5)])
def test_a_schedulers_state_is_refused_before_anything_changes(saved, name, value):
    checkpoint = torch.load(saved, weights_only=True)
    del checkpoint["digests"]
    checkpoint["lr_schedulers"][0][name] = value
    torch.save(checkpoint, saved)
    model, stopping = Net(), EarlyStopping("val_loss", patience=99)
    says = f"field .lr_schedulers/0.: the state doesn't belong to this StepLR: it has {name}={value!r}"
    with unchanged(model, stopping), pytest.raises(CheckpointMismatchError, match=says):
        fit(model, callbacks=[stopping], ckpt_path=saved)


def test_a_group_of_an_older_torch_is_completed(saved):
    checkpoint = torch.load(saved, weights_only=True)
    del checkpoint["digests"]
    del checkpoint["optimizer_states"][0]["param_groups"][0]["decoupled_weight_decay"]  # which torch 2.5 didn't have
    torch.save(checkpoint, saved)
    trainer = fit(Net(), ckpt_path=saved, max_steps=5)
    assert trainer.global_step == 5 and trainer.optimizers[0].param_groups[0]["decoupled_weight_decay"] is False


class Refuses(Callback):
    def state_dict(self):
        return {"version": 1}

    def load_state_dict(self, state_dict):
        raise ValueError("version 1 is too old")


def test_refusal_by_callback_changes_nothing(tmp_path):
    """A state that a callback refuses leaves model, optimizers and callbacks as they were."""
    fit(Net(), tmp_path / "kept", [Refuses(), Save(tmp_path / "x.ckpt", 9)])
    model, stopping = Net(), EarlyStopping("val_loss", patience=99)
    says = r"x.ckpt' can't be continued from: Refuses refuses its state, the field 'callbacks/Refuses' .*too old"
    with unchanged(model, stopping), pytest.raises(CheckpointMismatchError, match=says):
        fit(model, callbacks=[stopping, Refuses()], ckpt_path=tmp_path / "x.ckpt")


def test_foreign_weights_are_named(saved):
    """The error for another model's checkpoint names the weights, and none is loaded."""
    model = Net()
    model.body[2] = nn.Linear(3, 5, bias=False)
    says = "'body.2.weight' has the shape .3, 3. in the checkpoint and .5, 3. here; the model has no 'body.2.bias'"
    with unchanged(model), pytest.raises(CheckpointMismatchError, match=f"the weights don't belong to Net: {says}"):
        fit(model, ckpt_path=saved)


def test_refused_weights_keep_callbacks(saved):
    """Weights that are refused leave the callbacks as they were."""
    stopping, model = EarlyStopping("val_loss", patience=99), Net()
    model.register_buffer("more", torch.zeros(1))
    before = stopping.state_dict()
    with pytest.raises(CheckpointMismatchError, match=r"(?s)field 'state_dict'.*\"more\""):
        fit(model, callbacks=[stopping], ckpt_path=saved)
    assert stopping.state_dict() == before


# -- several callbacks of one class ------------------------------------------------------------------------------------


class Average(Callback):
    """Keeps an average of a weight, as an EMA does."""

    def __init__(self, decay, start=None):
        self.decay, self.value = decay, None

    def on_train_batch_end(self, trainer, module, *args):
        now = float(module.body[0].bias[0])
        self.value = now if self.value is None else self.decay * self.value + (1 - self.decay) * now

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


def test_callbacks_of_one_class(tmp_path):
    """Each of several callbacks of one class continues with its own state."""

    def averages(*decays):
        return [Average(decay) if decay == 0.5 else Average(decay=decay) for decay in decays]

    torch.manual_seed(1)
    whole = averages(0.5, 0.9, 0.9)
    fit(Net(), callbacks=whole, max_steps=6)
    torch.manual_seed(1)
    fit(Net(), callbacks=[*averages(0.5, 0.9, 0.9), Save(tmp_path / "x.ckpt", 6)], max_steps=6)
    resumed = averages(0.9, 0.5, 0.9)
    fit(Net(), callbacks=resumed, max_steps=6, ckpt_path=tmp_path / "x.ckpt")
    assert [each.value for each in resumed] == [whole[1].value, whole[0].value, whole[2].value]
    assert whole[0].value != whole[1].value


class AverageOfThree(Average):
    def __init__(self, *decays):
        super().__init__(decays[0])


class Plain(Callback):
    pass


def _keys(*callbacks):
    return callback_states(list(callbacks))


def test_a_callbacks_constructor_is_what_its_class_says():
    for make in (Average, lambda: Callback(1), lambda: Plain(decay=1), lambda: Average(0.5, end=1)):
        with pytest.raises(TypeError):
            make()
    assert list(inspect.signature(Average).parameters) == ["decay", "start"]
    assert list(inspect.signature(AverageOfThree).parameters) == ["decays"]
    assert list(inspect.signature(Plain).parameters) == []


def test_callback_key_of_subclass():
    """A callback's key names the arguments of the outermost constructor."""
    assert list(_keys(AverageOfThree(0.5, 0.9), AverageOfThree(0.5, 0.8))) == [
        "AverageOfThree(decays=[0.5, 0.9])",
        "AverageOfThree(decays=[0.5, 0.8])",
    ]
    assert list(_keys(Average(0.5))) == ["Average"]


def test_long_arguments_are_a_digest_in_the_key():
    long = list(range(1_000))
    keys = list(_keys(Average(0.5, long), Average(start=[*long], decay=0.5), Average(0.5, [*long[:-1], 0])))
    assert all(re.fullmatch(r"Average\([0-9a-f]{16}\)(#2)?", key) for key in keys)
    assert keys[1] == f"{keys[0]}#2" and keys[2] != keys[0]


def test_callback_key_of_long_arguments():
    """Arguments of millions of values are not spelled out in a callback's key."""

    class Value(int):
        read = 0

        def __repr__(self):
            Value.read += 1
            return "1"

    Average(0.5, [Value(1)] * 1_000_000)
    assert 1_000 < Value.read < 11_000


def test_callback_key_ignores_defaults(tmp_path):
    """A default that is spelled out makes no other callback."""
    fit(Net(), callbacks=[Average(0.5), Average(0.9), Save(tmp_path / "x.ckpt", 6)])
    spelled_out = [Average(0.5, start=None), Average(decay=0.9, start=None)]
    fit(Net(), callbacks=spelled_out, max_steps=3, ckpt_path=tmp_path / "x.ckpt")
    states = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]
    assert [average.value for average in spelled_out] == [
        states[f"Average(decay={decay})"]["value"] for decay in (0.5, 0.9)
    ]


def test_single_callback_with_changed_settings(tmp_path):
    """The only callback of a class keeps its state when its settings change."""
    fit(Net(), callbacks=[Average(0.5), Save(tmp_path / "x.ckpt", 6)])
    resumed = Average(0.6)
    fit(Net(), callbacks=[resumed], max_steps=3, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.value == torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]["Average"]["value"]


@pytest.mark.parametrize(("before", "after"), [((0.5,), (0.5, 0.9)), ((0.5, 0.9), (0.7,)), ((0.5, 0.9), (0.5, 0.7))])
def test_ambiguous_callback_state_refused(tmp_path, before, after):
    """A state that could belong to several callbacks is refused."""
    fit(Net(), callbacks=[*map(Average, before), Save(tmp_path / "x.ckpt", 6)])
    with pytest.raises(CheckpointMismatchError, match=r"x.ckpt' can't be continued from: it holds 'Average.*whose"):
        fit(Net(), callbacks=[*map(Average, after)], ckpt_path=tmp_path / "x.ckpt")


def test_a_callback_more_or_less_is_nobodys_loss(tmp_path):
    fit(Net(), callbacks=[Average(0.5), Average(0.9), Save(tmp_path / "x.ckpt", 6)])
    more = [Average(0.5), Average(0.9), Average(0.99)]
    fit(Net(), callbacks=more, max_steps=3, ckpt_path=tmp_path / "x.ckpt")
    assert more[0].value is not None and more[2].value is None
    fit(Net(), callbacks=[Average(0.5), Average(0.9, start=None)][:0], max_steps=3, ckpt_path=tmp_path / "x.ckpt")


# -- files that lie ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [99, "1", True, None, 0])
@pytest.mark.parametrize("what", ["fit", "test", "load_from_checkpoint"])
def test_another_format_is_refused(saved, form, what):
    checkpoint = torch.load(saved, weights_only=True)
    checkpoint["torchhal_format"] = form
    del checkpoint["digests"]
    torch.save(checkpoint, saved)
    model = Net()
    model.test_step = model.validation_step
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(CheckpointMismatchError, match="'torchhal_format'") as caught:
        if what == "load_from_checkpoint":
            Net.load_from_checkpoint(saved)
        else:
            getattr(trainer, what)(model, data(), ckpt_path=saved)
    assert str(saved) in str(caught.value)


def test_weights_alone_are_no_checkpoint_of_a_trainer(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointMismatchError, match=r"weights\.pt' is no checkpoint of a Trainer.*load_state_dict"):
        Net.load_from_checkpoint(tmp_path / "weights.pt")


@pytest.mark.parametrize("field", ["hyper_parameters", "hparams_left_out"])
@pytest.mark.parametrize("value", [5, "x", [("a", 1)], {3: 1}])
def test_hyperparameters_that_can_t_be_are_named(tmp_path, field, value):
    torch.save({"state_dict": Net().state_dict(), field: value}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointCorruptError, match=rf"x\.ckpt' is damaged: its field '{field}'"):
        Net.load_from_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("use", ["load_from_checkpoint", "ckpt_path", "dirpath"])
def test_url_of_unknown_file_system(use):
    """The error for a URL that no file system is for names it."""
    url = "nosuch://x/y.ckpt"
    with pytest.raises(CheckpointError, match=r"'nosuch://x/.*can't be reached.*fsspec's"):
        if use == "load_from_checkpoint":
            Net.load_from_checkpoint(url)
        elif use == "ckpt_path":
            fit(Net(), ckpt_path=url)
        else:
            fit(Net(), callbacks=[ModelCheckpoint("nosuch://x/y")], enable_checkpointing=True, max_steps=1)


def test_a_checkpoint_of_another_library_is_named_as_one(tmp_path):
    path = tmp_path / "theirs.ckpt"
    theirs = {
        "epoch": 3, "global_step": 12, "acme_version": "2.5.1", "state_dict": Net().state_dict(),
        "loops": {"fit_loop": {}}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": [],
    }  # fmt: skip
    torch.save(theirs, path)
    with pytest.raises(CheckpointMismatchError, match=r"by another library.*epoch, global_step.*load_from_checkpoint"):
        fit(Net(), ckpt_path=path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (("epoch",), -1),
        (("global_step",), 10**9),
        (("loops", "fit", "elapsed"), math.nan),
        (("loops", "fit", "accumulate"), 0),
        (("loops", "fit", "batches_done"), "3"),
        (("loops", "fit", "batches_done"), 2**70),
        (("loops", "results", "ranks"), {}),
        (("loops", "results", "ranks", 0, "train", 0, "reduction"), "median"),
        (("loops", "results", "ranks", 0, "train", 0, "reduction"), torch.zeros(2)),
        (("loops", "results", "ranks", 0, "train", 0, "sync"), "no"),
        (("ranks",), []),
        (("ranks", 0, "share"), [1, 1]),
        (("ranks", 0, "rng", "torch"), torch.zeros(3)),
        (("ranks", 0, "rng", "python"), [3, [1], None]),
        (("ranks", 0, "rng", "numpy"), ["MT19937", [0] * 624, 10**6, 0, 0.0]),
        (("ranks", 0, "data", "order", "per_batch"), 0),
        (("lr_schedulers",), None),
        (("callbacks",), [1]),
        (("precision",), 3),
        (("gradients",), {"body.0.weight": 1}),
        (("frozen",), ["scale"]),
        (("frozen", "at_start"), "scale"),
        (("frozen", "at_save"), [1]),
    ],
)
@pytest.mark.parametrize("sealed", [True, False])
def test_impossible_field_is_named(saved, field, value, sealed):
    """The error for an impossible field names it and its file."""
    checkpoint = torch.load(saved, weights_only=True)
    owner = checkpoint
    for key in field[:-1]:
        owner = owner[key]
    owner[field[-1]] = value
    if not sealed:
        del checkpoint["digests"]
    torch.save(checkpoint, saved)
    with pytest.raises(CheckpointError) as caught:
        fit(Net(), saved.parent / "other", ckpt_path=saved)
    assert str(saved) in str(caught.value) and str(field[0]) in str(caught.value)


def test_edited_checkpoint_needs_no_digests(saved):
    """A changed field is refused unless the digests are deleted, too."""
    checkpoint = torch.load(saved, weights_only=True)
    checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] *= 2
    torch.save(checkpoint, saved)
    with pytest.raises(CheckpointError, match=r"was changed after it was saved: its field 'optimizer_states/0'"):
        fit(Net(), ckpt_path=saved)
    del checkpoint["digests"]
    torch.save(checkpoint, saved)
    trainer = fit(Net(), ckpt_path=saved, max_steps=5)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 2 * trainer.optimizers[0].param_groups[1]["lr"]


def test_what_hooks_make_of_a_checkpoint_is_meant(saved):
    class Changes(Net):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.5

    trainer = fit(Changes(), ckpt_path=saved, max_steps=5)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


NEW_VALUES = [
    None, -1, 0, 1, 2**63, 0.5, math.nan, -math.inf, "", "x", True, [], {}, [1], {"x": 1}, b"x", torch.zeros(2),
    torch.tensor(1.0), (1, 2), {0: None},
]  # fmt: skip
UNTOUCHED = ("state_dict", "torchhal_version", "digests", "hyper_parameters")


def places(value, place=()):
    """Everything in a nest, the containers too."""
    if place:
        yield place
    if isinstance(value, dict):
        for key in value:
            if place or key not in UNTOUCHED:
                yield from places(value[key], (*place, key))
    elif isinstance(value, list) and len(value) < 100:
        for index in range(len(value)):
            yield from places(value[index], (*place, index))


def altered(checkpoint, where, rng):
    """A copy with one value changed, dropped or added; None where that changes nothing."""
    changed = owner = copy.copy(checkpoint)
    for key in where[:-1]:
        owner[key] = copy.copy(owner[key])
        owner = owner[key]
    key = where[-1]
    act = rng.random()
    if act < 0.15 and isinstance(owner, dict):
        del owner[key]
    elif act < 0.2 and isinstance(owner, list):
        owner.append(copy.deepcopy(owner[key]))
    elif act < 0.3 and type(owner[key]) in (int, float) and owner[key] == owner[key]:
        owner[key] += rng.choice([-1, 1, 1000])
    elif act < 0.35 and isinstance(owner[key], torch.Tensor) and owner[key].numel():
        owner[key] = owner[key].clone()
        owner[key].flatten()[rng.randrange(owner[key].numel())] += 1
    else:
        new = rng.choice(NEW_VALUES)
        old = owner[key]
        if type(old) is type(new) and (old is new or repr(old) == repr(new)):
            return None
        owner[key] = new
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [True, False])
def test_ten_thousand_altered_files(saved, sealed, monkeypatch):
    """None gives a raw error; with its digests, none is accepted that changes the run.

    One of twenty is written and read; of the others what a read would give is put in the place of the read, which is
    most of the time.
    """

    def outcome(path):
        model = Net()
        torch.manual_seed(5)
        random.seed(5)
        callbacks = [
            EarlyStopping("val_loss", patience=99),
            ModelCheckpoint(saved.parent / "other", "{step}", save_top_k=0),
        ]
        options = {"max_steps": 5, "limit_val_batches": 1, "enable_checkpointing": True}
        trainer = fit(model, callbacks=callbacks, ckpt_path=path, **options)
        return [*(value.clone() for value in model.state_dict().values()), torch.tensor(trainer.global_step)]

    reader = run_of(fit(Net(), max_steps=1))
    rng = random.Random(7)
    checkpoint = torch.load(saved, weights_only=True)
    expected = outcome(saved)
    everywhere = list(places(checkpoint))
    met = Counter()
    path = saved.parent / "altered.ckpt"
    read, instead = Strategy.load_checkpoint, None

    def load_checkpoint(strategy, path):
        return read(strategy, path) if instead is None else instead

    monkeypatch.setattr(Strategy, "load_checkpoint", load_checkpoint)
    for number in range(7000 if sealed else 3000):
        where = rng.choice(everywhere)
        changed = altered(checkpoint, where, rng)
        if changed is None:
            continue
        if not sealed:
            if (where[0] == "lr_schedulers" and len(where) > 2) or "param_groups" in where[:-2]:
                continue  # their arithmetic is their own: a step_size of 0, a capturable=True on the CPU
            del changed["digests"]
        instead = changed if number % 20 else None
        if instead is None:
            torch.save(changed, path)
        try:
            read_checkpoint(reader, str(path))  # as a fit does it, before anything else
            instead = copy.deepcopy(instead)  # a run changes what it has read
            found = outcome(path)
        except CheckpointError as error:
            met["refused"] += 1
            assert str(path) in str(error), (where, error)
            assert str(where[0]) in str(error), (where, error)
        except Exception as error:  # without digests a value may be missed by its reader: a metric, by a callback
            assert isinstance(error, TorchhalError) and not sealed, f"{where} gave a raw error"
        else:
            met["accepted"] += 1
            if sealed:
                assert all(map(torch.equal, found, expected)), where
    assert met["refused"] > 1500


class Sized(Net):
    def __init__(self, width: int, *, sizes: tuple = (1,), root: Path | None = None):
        super().__init__()
        self.save_hyperparameters()
        if width < 1 or not all(size > 0 for size in sizes):
            raise ValueError(f"{width} is no width")
        self.head = nn.Linear(4, width)


def test_altered_files(tmp_path):
    """An altered file gives a model or an error that names the file."""
    fit(Sized(3, sizes=(2, 5), root=Path("data")), callbacks=[Save(tmp_path / "x.ckpt", 6)])
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    names = ("state_dict", "hyper_parameters", "hparams_name", "hparams_left_out", "torchhal_format")
    part = {name: checkpoint[name] for name in names if name in checkpoint} | {
        "hparams_name": None, "hparams_left_out": {}, "torchhal_version": "0.1",
    }  # fmt: skip
    everywhere = [place[1:] for place in places({"part": part}) if len(place) > 1]
    rng, met = random.Random(3), Counter()

    class Altered(TorchCheckpointIO):
        def load_checkpoint(self, path, map_location=None, weights_only=True):
            return copy.deepcopy(changed)

    for _ in range(3_000):
        where = rng.choice(everywhere)
        changed = altered(part, where, rng)
        if changed is None:
            continue
        try:
            Sized.load_from_checkpoint(tmp_path / "x.ckpt", checkpoint_io=Altered())
        except CheckpointError as error:
            met["refused"] += 1
            assert str(tmp_path / "x.ckpt") in str(error), where
        else:
            met["accepted"] += 1
    assert met["refused"] > 1_000 and met["accepted"] > 100


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ImportError("no module"), TorchhalError("said")])
def test_unrelated_load_errors_pass(tmp_path, error, monkeypatch):
    """An error that no file can cause is not turned into another one."""
    fit(Sized(3), callbacks=[Save(tmp_path / "x.ckpt", 6)])

    def raises(*args, **kwargs):
        raise error

    for name in ("load_state_dict", "__init__"):
        monkeypatch.setattr(Sized, name, raises)
        with pytest.raises(type(error), match=str(error)):
            Sized.load_from_checkpoint(tmp_path / "x.ckpt")


def test_constructor_error_names_file_arguments(tmp_path):
    """The error of a constructor is named with the arguments from the file."""
    fit(Sized(3), callbacks=[Save(tmp_path / "x.ckpt", 6)])
    says = r"its __init__ raised ValueError: 0 is no width. Arguments from the file: sizes, root\. Pass"
    with pytest.raises(CheckpointMismatchError, match=says):
        Sized.load_from_checkpoint(tmp_path / "x.ckpt", width=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool])
def test_weights_of_another_kind_are_refused(saved, dtype):
    checkpoint = torch.load(saved, weights_only=True)
    checkpoint["state_dict"]["body.2.weight"] = checkpoint["state_dict"]["body.2.weight"].to(dtype)
    torch.save(checkpoint, saved)
    model, says = Net(), rf"x.ckpt' .*'body.2.weight' is of {dtype}, and that of Net of torch.float32"
    with unchanged(model), pytest.raises(CheckpointMismatchError, match=says):
        fit(model, ckpt_path=saved)
    with pytest.raises(CheckpointMismatchError, match=says):
        Net.load_from_checkpoint(saved)


def test_weights_of_another_precision_are_taken(saved):
    checkpoint = torch.load(saved, weights_only=True)
    checkpoint["state_dict"] = {name: value.bfloat16() for name, value in checkpoint["state_dict"].items()}
    torch.save(checkpoint, saved)
    assert Net.load_from_checkpoint(saved).body[0].weight.dtype == torch.float32
