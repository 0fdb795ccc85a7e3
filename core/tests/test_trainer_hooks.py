"""Who is called when, with what, and what a model may do there."""

import argparse
import copy
import functools
import gc
import io
import os
import pickle
import threading
import weakref

import hardware
import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, DataModule, Module, Trainer
from torchhal.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    ConfigurationError,
    ModelError,
)
from torchhal.trainer.callbacks import EarlyStopping, ModelCheckpoint

pytestmark = pytest.mark.usefixtures("accelerator")


def batches(count=2, size=2):
    return [torch.full((size, 1), float(index + 1)) for index in range(count)]


def make(*callbacks, **options):
    defaults = {
        "accelerator": hardware.name(), "devices": 1, "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 1,
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch).pow(2).mean())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model=None, train=None, val=None, *callbacks, **options):
    model = model or Net()
    trainer = make(*callbacks, **options)
    trainer.fit(model, batches() if train is None else train, val)
    return trainer, model


# -- the order of everything -------------------------------------------------------------------------------------

HOOKS = [
    name
    for name in dir(Callback)
    if name.startswith("on_") or name in ("setup", "teardown")
]  # fmt: skip
MODEL_ONLY = [
    "prepare_data", "configure_model", "configure_optimizers", "configure_callbacks", "training_step",
    "validation_step", "test_step", "predict_step", "train_dataloader", "val_dataloader", "test_dataloader",
    "predict_dataloader", "on_validation_model_eval", "on_validation_model_train", "on_test_model_eval",
    "on_test_model_train", "on_predict_model_eval", "on_predict_model_train", "on_before_batch_transfer",
    "transfer_batch_to_device", "on_after_batch_transfer", "backward", "optimizer_step", "optimizer_zero_grad",
    "configure_gradient_clipping", "lr_scheduler_step",
]  # fmt: skip


def recording(base, owner, names, events):
    """A subclass of ``base`` whose methods note their call before they do what the base does."""

    def method(name):
        inherited = getattr(base, name, None)

        @functools.wraps(inherited or (lambda self, *args: None))
        def call(self, *args, **kwargs):
            events.append(f"{owner}.{name}")
            return inherited(self, *args, **kwargs) if inherited is not None else None

        return call

    return type(base.__name__, (base,), {name: method(name) for name in names})


class Full(Net):
    def train_dataloader(self):
        return batches(1)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


def run_all(fn, **options):
    events = []
    module_hooks = [name for name in HOOKS if hasattr(Module, name)]
    model = recording(Full, "m", module_hooks + MODEL_ONLY, events)()
    callback = recording(Callback, "c", HOOKS, events)()
    trainer = make(callback, num_sanity_val_steps=1, gradient_clip_val=1.0, **options)
    getattr(trainer, fn)(model, **({} if fn == "fit" else {"verbose": False} if fn != "predict" else {}))
    return events


def both(*names):
    return [f"{owner}.{name}" for name in names for owner in ("c", "m")]


def transfer():
    return ["m.on_before_batch_transfer", "m.transfer_batch_to_device", "m.on_after_batch_transfer"]


def set_up(*names):
    return ["m.prepare_data", "m.configure_callbacks", "c.setup", "m.setup", "m.configure_model", *names]


def evaluation(word):
    return [
        f"m.on_{word}_model_eval",
        *both(f"on_{word}_start", f"on_{word}_epoch_start"),
        *transfer(),
        *both(f"on_{word}_batch_start"),
        f"m.{word}_step",
        *both(f"on_{word}_batch_end", f"on_{word}_epoch_end", f"on_{word}_end"),
        f"m.on_{word}_model_train",
    ]


def test_the_order_of_a_fit():
    assert run_all("fit") == [
        *set_up("m.configure_optimizers", "m.train_dataloader", "m.val_dataloader"),
        *both("on_fit_start"),
        "c.on_sanity_check_start",
        *evaluation("validation"),
        "c.on_sanity_check_end",
        *both("on_train_start", "on_train_epoch_start"),
        *transfer(),
        *both("on_train_batch_start"),
        "m.optimizer_step",
        "m.training_step",
        *both("on_before_zero_grad"),
        "m.optimizer_zero_grad",
        *both("on_before_backward"),
        "m.backward",
        *both("on_after_backward", "on_before_optimizer_step"),
        "m.configure_gradient_clipping",
        "m.lr_scheduler_step",
        *both("on_train_batch_end"),
        *evaluation("validation"),
        *both("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
    ]


@pytest.mark.parametrize(
    ("fn", "word", "loader"), [("validate", "validation", "val"), ("test", "test", "test"), ("predict",) * 3]
)
def test_the_order_of_an_evaluation(fn, word, loader):
    assert run_all(fn) == [*set_up(f"m.{loader}_dataloader"), *evaluation(word), *both("teardown")]


def test_the_state_at_each_hook():
    seen = {}

    class Look(Callback):
        def look(self, hook, trainer):
            state = trainer.state
            flags = [
                name
                for name in ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")
                if getattr(trainer, name)
            ]
            seen.setdefault(f"{state.fn} {hook}", set()).add((state.stage, state.status, *flags))

    for hook in HOOKS:
        setattr(Look, hook, lambda self, trainer, *args, hook=hook: self.look(hook, trainer))
    trainer = make(Look(), num_sanity_val_steps=1)
    assert (trainer.state.fn, trainer.state.stage, trainer.state.status) == (None, None, "initializing")
    trainer.fit(Full())
    for fn in ("validate", "test", "predict"):
        getattr(trainer, fn)(Full())
        assert (trainer.state.fn, trainer.state.stage, trainer.state.status) == (fn, None, "finished")
    train = ("train", "running", "training")
    sanity = ("sanity_check", "running", "sanity_checking", "evaluating")
    validate = ("validate", "running", "validating", "evaluating")
    for hook in ("setup", "on_fit_start", "on_train_batch_end", "on_train_epoch_end", "on_fit_end", "teardown"):
        assert seen[f"fit {hook}"] == {train}
    for hook in ("on_validation_start", "on_validation_batch_end", "on_validation_end"):
        assert seen[f"fit {hook}"] == {sanity, validate}
        assert seen[f"validate {hook}"] == {validate}
    assert seen["fit on_sanity_check_start"] == seen["fit on_sanity_check_end"] == {sanity}
    assert seen["test setup"] == seen["test on_test_batch_end"] == {("test", "running", "testing", "evaluating")}
    assert seen["predict on_predict_end"] == {("predict", "running", "predicting")}


def test_what_batch_hooks_are_given():
    given = {}

    class Shift(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch + 100

        def training_step(self, batch, batch_idx):
            return {"loss": self.layer(batch).mean(), "extra": 7}

        def validation_step(self, batch, batch_idx):
            return "out"

    class Look(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            given["start"] = (int(batch[0]), batch_idx)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            given["end"] = (outputs["extra"], int(batch[0]), batch_idx)

        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
            given[f"val {dataloader_idx}"] = (outputs, int(batch[0]), batch_idx)

    class Two(Shift):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            return "out"

    fit(Two(), None, [DataLoader(torch.ones(2, 1)), DataLoader(torch.ones(3, 1))], Look())
    assert given == {"start": (102, 1), "end": (7, 102, 1), "val 0": ("out", 101, 1), "val 1": ("out", 101, 2)}


@pytest.mark.parametrize("several", [False, True], ids=["one loader", "two loaders"])
@pytest.mark.parametrize(("fn", "word"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_evaluation_hooks_get_dataloader_idx_if_they_take_it(fn, word, several):
    given = []

    def hook(name, parameters):
        body = f"given.append(({name!r}, {{name: value for name, value in locals().items() if name in NAMES}}))"
        scope = {"given": given, "NAMES": ("dataloader_idx", "rest", "named")}
        exec(f"def hook({parameters}):\n    {body}", scope)
        return scope["hook"]

    class Evaluated(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            return 1

        test_step = predict_step = validation_step

    start, end = f"on_{word}_batch_start", f"on_{word}_batch_end"
    without, with_it = type("Without", (Callback,), {}), type("With", (Callback,), {})
    setattr(without, start, hook("without start", "self, trainer, module, batch, batch_idx"))
    setattr(without, end, hook("without end", "self, trainer, module, outputs, batch, batch_idx"))
    setattr(with_it, start, hook("named", "self, trainer, module, batch, batch_idx, *, dataloader_idx"))
    setattr(with_it, end, hook("rest", "self, trainer, module, *rest"))
    setattr(Evaluated, start, hook("model start", "self, batch, batch_idx, dataloader_idx=7"))
    setattr(Evaluated, end, hook("model end", "self, outputs, batch, batch_idx, **named"))
    loaders = 2 if several else 1
    getattr(make(without(), with_it()), fn)(Evaluated(), [DataLoader(torch.ones(1, 1)) for _ in range(loaders)])
    expected = []
    for index in range(loaders):
        named = {"dataloader_idx": index}
        expected += [("without start", {}), ("named", named), ("model start", named), ("without end", {})]
        expected += [("rest", index), ("model end", {"named": named})]
    assert [(name, found["rest"][-1] if name == "rest" else found) for name, found in given] == expected


def test_outputs_of_a_training_step_come_without_their_graph():
    kept = []

    class Dict(Net):
        def training_step(self, batch, batch_idx):
            out = self.layer(batch)
            self.output = {"loss": out.pow(2).mean(), "nested": [out, (out.sum(), "text")], "target": batch}
            return self.output

    class Keep(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            kept.append(outputs)

    fit(Net(), None, None, Keep())
    assert [loss.requires_grad for loss in kept] == [False, False] and kept[0].dim() == 0
    kept.clear()
    _, model = fit(Dict(), None, None, Keep())
    outputs = kept[-1]
    tensors = [outputs["loss"], outputs["nested"][0], outputs["nested"][1][0]]
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in tensors)
    assert outputs["nested"][1][1] == "text" and outputs["target"] is model.output["target"]
    assert model.output["loss"].grad_fn is not None, "the model's own dict is as it was"


def test_values_logged_before_a_step_are_weighed_with_its_batch():
    class Logs(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.log("first", float(batch[0]), on_epoch=True, on_step=False)

    trainer, _ = fit(Logs(), [torch.full((1, 1), 1.0), torch.full((3, 1), 5.0)])
    assert trainer.callback_metrics["first"].item() == pytest.approx(4.0)  # (1 + 3 * 5) / 4


# -- training_step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", [(), (0,), (1,), (0, 1), (2,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("override", [False, True], ids=["plain", "optimizer_step"])
def test_none_skips_a_batch(skipped, accumulate, override):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in skipped else super().training_step(batch, batch_idx)

    class Overrides(Skips):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # a step without gradients would move

    torch.manual_seed(0)
    model = (Overrides if override else Skips)()
    weight = model.layer.weight.detach().clone()
    trainer, model = fit(model, batches(4), accumulate_grad_batches=accumulate)
    windows = [range(start, start + accumulate) for start in range(0, 4, accumulate)]
    steps = sum(any(index not in skipped for index in window) for window in windows)
    assert trainer.global_step == steps
    assert torch.equal(weight, model.layer.weight) == (steps == 0)


@pytest.mark.parametrize(
    "step",
    [
        lambda self, batch: self.layer(batch).mean(),
        lambda self, train_batch, _idx: self.layer(train_batch).mean(),
        lambda self, batch, *args, **kwargs: self.layer(batch).mean() * (len(args) == 1 or None),
        lambda self, batch, batch_idx, dataloader_idx=0: self.layer(batch).mean() + dataloader_idx,
        lambda self, batch, batch_idx, dataloader_idx: self.layer(batch).mean() + dataloader_idx,
        lambda self, *args: self.layer(args[0]).mean(),
        lambda self, batch, batch_idx: {"loss": self.layer(batch).mean()},
        lambda self, batch, batch_idx: {"loss": None},
        lambda self, batch, batch_idx: self.layer(batch).sum().reshape(1, 1),
    ],
)
def test_signatures_and_returns_of_training_step(step):
    trainer, _ = fit(type("Steps", (Net,), {"training_step": step})())
    assert trainer.global_step in (0, 2)


def wrapped(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("step", "loaders"),
    [
        (lambda self, batch: seen.append(()), 2),
        (lambda self, batch, i: seen.append((i,)), 1),
        (lambda self, batch, i, d=0: seen.append((i, d)), 2),
        (lambda self, batch, i, d: seen.append((i, d)), 1),
        (lambda self, *args: seen.append(args[1:]), 2),
        (wrapped(lambda self, batch: seen.append(())), 1),
        (wrapped(lambda self, batch, i, d=0: seen.append((i, d))), 2),
    ],
)
def test_signatures_of_validation_step(step, loaders):
    seen.clear()
    model = type("Steps", (Net,), {"validation_step": step})()
    make().validate(model, [DataLoader(torch.ones(1, 1))] * loaders, verbose=False)
    assert len(seen) == loaders
    assert seen[0] in ((), (0,), (0, 0)) and seen[-1] in ((), (0,), (0, loaders - 1))


seen = []


def test_several_loaders_want_dataloader_idx():
    with pytest.raises(ModelError, match=r"validation_step must take \(batch, batch_idx, dataloader_idx\)"):
        make().validate(Net(), [DataLoader(torch.ones(1, 1))] * 2)


def test_a_plain_module_trains_and_is_evaluated():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch):
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def predict_step(self, batch):
            return self.layer(batch)

    model = Plain()
    before = model.layer.weight.item()
    trainer, _ = fit(model)
    assert trainer.global_step == 2 and model.layer.weight.item() != before and model.training
    assert len(trainer.predict(model, batches(3))) == 3 and model.training
    assert not hasattr(model, "trainer")


# -- optimizers and schedulers -----------------------------------------------------------------------------------


class Scheduler:
    """Not torch's."""

    def __init__(self):
        self.steps = []

    def step(self, *args):
        self.steps.append(args)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def forms(optimizer):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return [
        (optimizer, 0, None),
        ([optimizer], 0, None),
        ((optimizer,), 0, None),
        (([optimizer], [scheduler]), 1, None),
        ([[optimizer], [scheduler]], 1, None),
        (([optimizer], scheduler), 1, None),
        (([optimizer], []), 0, None),
        (([optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2, "name": "x"}]), 1, None),
        ({"optimizer": optimizer}, 0, None),
        ({"optimizer": optimizer, "lr_scheduler": None}, 0, None),
        ({"optimizer": optimizer, "lr_scheduler": scheduler}, 1, None),
        ({"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "m"}}, 1, "m"),
        ({"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "m"}, 1, "m"),
        ({"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau}, "monitor": "m"}, 1, "m"),
        (({"optimizer": optimizer, "lr_scheduler": scheduler},), 1, None),
        ([{"optimizer": optimizer}], 0, None),
    ]


@pytest.mark.parametrize("index", range(16))
def test_accepted_forms(index):
    class Forms(Net):
        def training_step(self, batch, batch_idx):
            self.log("m", 1.0)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            value, self.schedulers, self.monitor = forms(torch.optim.SGD(self.parameters(), lr=0.1))[index]
            return value

    trainer, model = fit(Forms())
    assert len(trainer.optimizers) == 1 and len(trainer.lr_scheduler_configs) == model.schedulers
    assert trainer.global_step == 2
    assert [config.monitor for config in trainer.lr_scheduler_configs] == [model.monitor] * model.schedulers


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda m, o, s: (o, s), r"\(got SGD, StepLR\): write \[optimizer\], \[scheduler\]"),
        (lambda m, o, s: 3, r"configure_optimizers must return an optimizer, .* \(got 3\)"),
        (lambda m, o, s: "sgd", r"must return an optimizer"),
        (lambda m, o, s: [o, 3], r"must return an optimizer"),
        (lambda m, o, s: {"lr_scheduler": s}, r"a dict without 'optimizer'"),
        (lambda m, o, s: {"optimizer": o, "scheduler": s}, r"a dict with the keys 'scheduler'; it may hold"),
        (lambda m, o, s: {"optimizer": o, "frequency": 2}, r"a dict with the keys 'frequency'"),
        (lambda m, o, s: ([o], [None]), r"must be an object with a method step \(got None\)"),
        (lambda m, o, s: ([o], [torch.optim.lr_scheduler.StepLR]), r"an object with a method step \(got <class"),
        (lambda m, o, s: ([o], [{"scheduler": s, "intervall": "step"}]), r"\(got 'intervall' too\)"),
        (lambda m, o, s: ([o], [{"scheduler": s, "interval": "batch"}]), r"'interval' .* \(got 'batch'\)"),
        (lambda m, o, s: ([o], [{"scheduler": s, "frequency": 0}]), r"'frequency' .* \(got 0\)"),
        (lambda m, o, s: ([o], [{"scheduler": s, "frequency": True}]), r"'frequency' .* \(got True\)"),
        (
            lambda m, o, s: ([o], [torch.optim.lr_scheduler.ReduceLROnPlateau(o)]),
            r"ReduceLROnPlateau of Refused needs the name of a logged metric",
        ),
        (
            lambda m, o, s: torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1),
            r"holds 2 parameter\(s\), none of which belong to the model",
        ),
        (lambda m, o, s: torch.optim.SGD(copy.deepcopy(m).parameters(), lr=0.1), r"none of which belong"),
        (
            lambda m, o, s: [o, torch.optim.SGD(m.parameters(), lr=1.0)],
            r"has 2 optimizers: .*automatic_optimization = False",
        ),
    ],
)
def test_refused_forms(value, message):
    class Refused(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return value(self, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))

    with pytest.raises(ModelError, match=message):
        fit(Refused())


def test_optimizers_that_are_taken_away_are_said():
    class Stops(Net):
        def on_train_start(self):
            self.trainer.optimizers = []

    with pytest.warns(UserWarning, match="set to an empty list: nothing is optimized"):
        fit(Stops())


def test_log_dict_takes_names_and_values():
    class Lists(Net):
        def training_step(self, batch, batch_idx):
            self.log_dict([1.0])

    with pytest.raises(TypeError, match=r"'metrics' of self.log_dict must map names to values \(got \[1.0\]\)"):
        fit(Lists())


def test_no_optimizer_at_all():
    class Gathers(Net):
        def training_step(self, batch, batch_idx):
            return None

        def configure_optimizers(self):
            return None

    with pytest.warns(UserWarning, match="returned None: nothing is optimized"):
        trainer, _ = fit(Gathers(), batches(3))
    assert trainer.global_step == 3


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({}, 3),
        ({"interval": "epoch", "frequency": 2}, 1),
        ({"interval": "step"}, 6),
        ({"interval": "step", "frequency": 4}, 1),
    ],
    ids=str,
)
def test_schedulers_step_when_they_say(config, steps):
    class Schedules(Net):
        def configure_optimizers(self):
            self.scheduler = Scheduler()
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": self.scheduler, **config}]

    trainer, model = fit(Schedules(), batches(4), max_epochs=3, accumulate_grad_batches=2)
    assert trainer.global_step == 6 and model.scheduler.steps == [()] * steps


def test_a_monitored_scheduler_sees_the_validation_of_its_epoch():
    class Plateau(Net):
        values = iter([5.0, 4.0, 4.5, 4.5])

        def validation_step(self, batch, batch_idx):
            self.log("score", next(self.values))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "score"}

    rates = []

    class Look(Callback):
        def on_train_epoch_start(self, trainer, module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(Plateau(), None, batches(1), Look(), max_epochs=4)
    assert rates == [1.0, 1.0, 1.0, 0.5]


def test_lr_scheduler_step_of_the_model():
    class Own(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.calls = []
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [Scheduler(), {"scheduler": plateau, "monitor": "val_loss"}]

        def lr_scheduler_step(self, scheduler, metric):
            self.calls.append((type(scheduler).__name__, metric is None))

    _, model = fit(Own(), None, batches(1), max_epochs=2)
    assert model.calls == [("Scheduler", True), ("ReduceLROnPlateau", False)] * 2


def test_a_missing_monitor_is_named_or_skipped():
    class Missing(Net):
        strict = True

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": plateau, "monitor": "nope", "strict": self.strict}]

    with pytest.raises(
        ConfigurationError, match=r"ReduceLROnPlateau monitors 'nope', which was not logged.*'val_loss'"
    ):
        fit(Missing(), None, batches(1))
    Missing.strict = False
    assert fit(Missing(), None, batches(1))[0].global_step == 2


def test_the_length_of_training_is_known_in_configure_optimizers():
    class Looks(Net):
        def train_dataloader(self):
            self.asked = getattr(self, "asked", 0) + 1
            return batches(5)

        def configure_optimizers(self):
            trainer = self.trainer
            assert trainer.train_dataloader is None  # not loaded before somebody needs it
            self.batches = trainer.num_training_batches
            self.steps = trainer.estimated_stepping_batches
            assert trainer.train_dataloader is not None
            return super().configure_optimizers()

    for options, expected in (
        ({"max_epochs": 3}, (5, 15)),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, (5, 9)),
        ({"max_epochs": 3, "limit_train_batches": 0.4}, (2, 6)),
        ({"max_epochs": 3, "max_steps": 4}, (5, 4)),
        ({"max_epochs": None, "max_steps": 7}, (5, 7)),
        ({"fast_dev_run": 2}, (2, 2)),
    ):
        model = Looks()
        trainer = make(**options)
        trainer.fit(model)
        assert (model.batches, model.steps) == expected
        assert trainer.global_step == expected[1] and model.asked == 1


# -- overridden pieces of the step -------------------------------------------------------------------------------


def test_the_pieces_of_a_step_may_be_replaced():
    class Pieces(Net):
        def __init__(self):
            super().__init__()
            self.calls = []

        def backward(self, loss, *args, **kwargs):
            self.calls.append("backward")
            (2 * loss).backward()

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            self.calls.append(("zero", epoch, batch_idx))
            optimizer.zero_grad(set_to_none=False)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.calls.append(("clip", gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer, 0.001, "value")

        def on_before_optimizer_step(self, optimizer):
            self.before = self.layer.weight.grad.item()

    torch.manual_seed(0)
    model = Pieces()
    weight = model.layer.weight.item()
    _, model = fit(model, [torch.ones(1, 1)], gradient_clip_val=3.0)
    assert model.calls == [("zero", 0, 0), "backward", ("clip", 3.0, "norm")]
    assert abs(model.layer.weight.item() - weight) == pytest.approx(0.1 * 0.001, rel=1e-3)
    assert abs(model.before) > 0.001  # seen before clipping


def test_transfer_hooks_of_a_data_module_win():
    class Shift(DataModule):
        def train_dataloader(self):
            return batches(1)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {"x": batch}

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            assert device == hardware.device()
            return batch["x"].to(device)

    class Own(Net):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            raise AssertionError("the data module's comes first")

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.got = batch
            return batch

    model = Own()
    make().fit(model, datamodule=Shift())
    assert torch.equal(model.got, hardware.to_device(batches(1)[0]))


def test_a_model_built_in_configure_model():
    class Late(Net):
        def __init__(self):
            Module.__init__(self)

        def configure_model(self):
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(1, 1)

    trainer, model = fit(Late())
    trainer.validate(model, batches(1), verbose=False)
    assert trainer.global_step == 2


# -- manual optimization -----------------------------------------------------------------------------------------


def test_manual_optimization():
    class Manual(Net):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.calls = []

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            for optimizer in (first, second):
                loss = self.layer(batch).pow(2).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.lr_schedulers().step()
            return {"anything": 1}

        def on_before_optimizer_step(self, optimizer):
            self.calls.append("before step")

        def on_after_backward(self):
            self.calls.append("after backward")

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            raise AssertionError("clipping is the model's own affair here")

        def optimizer_step(self, *args):
            raise AssertionError("not in manual optimization")

        def configure_optimizers(self):
            optimizers = [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]
            return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)]

    class Mistaken(Net):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.layer(batch).mean())

    trainer, model = fit(Manual(), batches(3))
    assert trainer.global_step == 6
    assert model.calls.count("before step") == 6
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 8)  # stepped by hand alone
    assert [type(o) for o in model.optimizers(use_pl_optimizer=False)] == [torch.optim.SGD] * 2
    for name, value in (
        ("gradient_clip_val", 1.0), ("gradient_clip_algorithm", "value"), ("accumulate_grad_batches", 2)
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=rf"'{name}' must be .* manual optimization \(got {value!r}\)"):
            fit(Manual(), **{name: value})
    with pytest.raises(ModelError, match="manual_backward needs manual optimization"):
        fit(Mistaken())


def test_closures_by_hand():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.layer(batch).pow(2).mean()
                self.manual_backward(loss)
                return loss

            assert optimizer.step(closure).ndim == 0

    trainer, _ = fit(Manual(), batches(3))
    assert trainer.global_step == 3


# -- data modules, set-up and tear-down --------------------------------------------------------------------------


class Data(DataModule):
    def __init__(self):
        self.calls = []

    def prepare_data(self):
        self.calls.append(("prepare", self.trainer.state.fn))

    def setup(self, stage):
        self.calls.append(("setup", stage, self.trainer.training, self.trainer.testing))

    def teardown(self, stage):
        self.calls.append(("teardown", stage))

    def train_dataloader(self):
        return batches(2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def test_a_data_module_by_position_and_by_name():
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


def test_a_copy_of_a_module_or_data_module_leaves_the_trainer_behind():
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


def test_a_checkpoint_callback_of_the_model_is_said_where_checkpointing_is_off(tmp_path):
    class Keeps(Net):
        def configure_callbacks(self):
            return ModelCheckpoint(tmp_path)

    with pytest.warns(UserWarning, match="False, but Keeps.configure_callbacks returned a ModelCheckpoint"):
        fit(Keeps())
    assert os.listdir(tmp_path)


def test_best_is_known_when_the_model_brought_the_checkpoint(tmp_path):
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


# -- logging -----------------------------------------------------------------------------------------------------

LOGGABLE = [
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "training_step", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end",
    "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start",
    "validation_step", "on_validation_batch_end", "on_validation_epoch_end",
]  # fmt: skip


@pytest.mark.parametrize("hook", LOGGABLE)
def test_log_in_hooks(hook):
    class Logs(Net):
        pass

    def body(self, *args):
        self.log("x", 3.0)
        if hook in ("training_step", "validation_step"):
            return getattr(Net, hook)(self, *args)

    setattr(Logs, hook, body)
    trainer, _ = fit(Logs(), None, batches(1))
    assert trainer.callback_metrics["x"].item() == 3.0


def test_log_without_a_trainer_says_so():
    model = Net()
    with pytest.warns(UserWarning, match="'loss' of Net goes nowhere: self.log needs a Trainer") as said:
        model.log("loss", 1.0)
    assert said[0].filename == __file__, "the line of the caller"
    with pytest.warns(UserWarning, match="'a', 'b' of Net goes nowhere") as said:
        model.log_dict({"a": 1.0, "b": 2.0})
    assert said[0].filename == __file__ and len(said) == 1


@pytest.mark.parametrize(
    "hook",
    ["setup", "configure_optimizers", "on_fit_start", "on_train_end", "on_fit_end", "on_validation_end", "teardown"],
)
def test_log_where_there_is_nothing_to_log_for(hook):
    class Logs(Net):
        pass

    def body(self, *args):
        self.log("x", 3.0)

    setattr(Logs, hook, body)
    with pytest.raises(ConfigurationError, match="x"):
        fit(Logs(), None, batches(1))


def test_metrics_are_live_in_hooks():
    found = {}

    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("both", float(batch_idx), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("late", 8.0)

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            found[batch_idx] = trainer.callback_metrics["both_step"].item()

        def on_validation_end(self, trainer, module):
            found["val"] = "val_loss" in trainer.callback_metrics

        def on_train_epoch_end(self, trainer, module):
            found["epoch"] = trainer.callback_metrics["both_epoch"].item()

    trainer, _ = fit(Logs(), None, batches(1), Look())
    assert found == {0: 0.0, 1: 1.0, "val": True, "epoch": 0.5}
    assert trainer.callback_metrics["both"].item() == 0.5 and trainer.callback_metrics["late"].item() == 8.0


# -- hyperparameters ---------------------------------------------------------------------------------------------


class Params(Net):
    def __init__(self, width, depth=2, *, rate=0.1, **more):
        super().__init__()
        self.save_hyperparameters()


class Derived(Params):
    def __init__(self, width, extra, **more):
        super().__init__(width, **more)


class Ignoring(Net):
    def __init__(self, width, body=None, array=None):
        super().__init__()
        self.save_hyperparameters(ignore=["body"])


class Some(Net):
    def __init__(self, width, depth):
        super().__init__()
        self.save_hyperparameters("width")


class Config(Net):
    def __init__(self, config, other=1):
        super().__init__()
        self.save_hyperparameters(config)


def test_saved_hyperparameters():
    assert Params(3).hparams == {"width": 3, "depth": 2, "rate": 0.1}
    assert Params(3, 4, rate=1.0, colour="red").hparams == {"width": 3, "depth": 4, "rate": 1.0, "colour": "red"}
    assert Derived(3, "e", rate=5).hparams == {"width": 3, "extra": "e", "depth": 2, "rate": 5}
    array = numpy.zeros(3)  # comparing one with anything gives no bool
    assert Ignoring(3, nn.Linear(1, 1), array).hparams == {"width": 3, "array": array}
    assert Some(3, 4).hparams == {"width": 3} and Some(3, 4).hparams.width == 3
    assert Config({"a": 1}).hparams == Config(argparse.Namespace(a=1)).hparams == {"a": 1}
    with pytest.raises(AttributeError, match="no hyperparameter 'nope': there are width"):
        _ = Some(3, 4).hparams.nope
    with pytest.raises(ValueError, match=r"'names' must be arguments of .* width, depth \(got 'wdith'\)"):

        class Wrong(Net):
            def __init__(self, width, depth):
                super().__init__()
                self.save_hyperparameters("wdith")

        Wrong(1, 2)


@pytest.mark.parametrize(
    "model",
    [Params(3, 4, rate=1.0, colour="red"), Derived(3, "e", rate=5), Config({"a": 1}), Config(argparse.Namespace(a=1))],
    ids=lambda model: type(model).__name__,
)
def test_a_model_is_rebuilt_from_its_checkpoint(tmp_path, model):
    trainer, _ = fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = type(model).load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.hparams == model.hparams and torch.equal(again.layer.weight, model.layer.weight)


def test_what_a_checkpoint_lacks_or_does_not_fit(tmp_path):
    trainer, _ = fit(Params(3))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert Params.load_from_checkpoint(tmp_path / "a.ckpt", width=9).hparams.width == 9
    assert type(Net.load_from_checkpoint(tmp_path / "a.ckpt")) is Net  # takes none of them

    class Other(Net):
        def __init__(self, width, needed):
            super().__init__()

    with pytest.raises(CheckpointMismatchError, match=r"Other can't be built from .*'needed'.*Pass what"):
        Other.load_from_checkpoint(tmp_path / "a.ckpt")
    assert type(Other.load_from_checkpoint(tmp_path / "a.ckpt", needed=1)) is Other

    class Bigger(Net):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(CheckpointMismatchError, match=r"(?s)the weights don't belong to Bigger.*more\.weight"):
        Bigger.load_from_checkpoint(tmp_path / "a.ckpt")
    assert Bigger.load_from_checkpoint(tmp_path / "a.ckpt", strict=False).more.weight.shape == (2, 2)
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
        Params.load_from_checkpoint(tmp_path / "nothing.ckpt")


def test_objects_stay_out_of_checkpoints_with_a_warning(tmp_path):
    trainer, _ = fit(Ignoring(3, array=DataLoader(torch.ones(1))))
    with pytest.warns(UserWarning, match=r"'array' \(DataLoader\) are or hold objects and are not saved"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {"width": 3}
    with pytest.raises(CheckpointMismatchError, match=r"was made with objects.* Pass array=... \(a DataLoader\)"):
        Ignoring.load_from_checkpoint(tmp_path / "a.ckpt")  # not the default in its place
    assert Ignoring.load_from_checkpoint(tmp_path / "a.ckpt", array=None).hparams.array is None


def test_a_data_module_is_rebuilt_too(tmp_path):
    class Mine(Data):
        def __init__(self, size, seen=0):
            super().__init__()
            self.save_hyperparameters()
            self.seen = seen

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    data = Mine(4)
    trainer = make()
    data.seen = 12
    trainer.fit(Net(), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Mine.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.hparams.size == 4 and again.seen == 12
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint[Mine.__qualname__] = {"unseen": 12}
    torch.save(checkpoint, tmp_path / "b.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"b.ckpt': .*Mine.load_state_dict raised KeyError for .*'seen'"):
        Mine.load_from_checkpoint(tmp_path / "b.ckpt")
    checkpoint[Mine.__qualname__] = 12
    torch.save(checkpoint, tmp_path / "b.ckpt")
    with pytest.raises(CheckpointCorruptError, match=r"b.ckpt. is damaged: its field .*Mine. must be a dict"):
        Mine.load_from_checkpoint(tmp_path / "b.ckpt")


# -- one process, several calls ----------------------------------------------------------------------------------


def test_fit_test_fit():
    model = Net()
    trainer = make(max_epochs=1)
    for epochs in (1, 2, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, batches(), batches(1))
        assert (trainer.global_step, trainer.current_epoch) == (2 * epochs, epochs)
        assert trainer.test(model, batches(1), verbose=False)[0].keys() == {"test_loss"}
        assert model.training and trainer.optimizers


class Fails(Net):
    """Raises in one place, once."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def fail(self, place):
        if place == self.place:
            self.place = None
            raise ZeroDivisionError(place)


PLACES = [
    "prepare_data", "setup", "configure_model", "configure_callbacks", "configure_optimizers", "train_dataloader",
    "val_dataloader", "on_fit_start", "on_validation_start", "validation_step", "on_train_start",
    "on_train_epoch_start", "on_train_batch_start", "training_step", "on_before_zero_grad", "backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end", "on_train_end",
    "on_fit_end", "teardown",
]  # fmt: skip
for _name in PLACES:

    def _body(self, *args, _name=_name, **kwargs):
        self.fail(_name)
        if _name.endswith("dataloader"):
            return batches(3)
        inherited = getattr(Net, _name, None)
        return inherited(self, *args, **kwargs) if inherited is not None else None

    setattr(Fails, _name, _body)


@pytest.mark.parametrize("place", PLACES)
def test_after_a_failure_anywhere_everything_is_torn_down_and_the_next_fit_works(place):
    calls = []

    class Watch(Callback):
        def on_exception(self, trainer, module, exception):
            calls.append(("exception", str(exception)))

        def teardown(self, trainer, module, stage):
            calls.append(("teardown", stage))

    model = Fails(place)
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
    trainer = make(Watch(), num_sanity_val_steps=1, deterministic=True, detect_anomaly=True)
    with pytest.raises(ZeroDivisionError, match=f"^{place}$"):
        trainer.fit(model)
    assert sorted(calls) == [("exception", place), ("teardown", "fit")]
    assert trainer.state.status == "interrupted" and trainer.state.stage is None
    assert not trainer.strategy.is_set_up
    assert model.training and model.layer.training
    assert (torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()) == flags
    if place in ("on_train_end", "on_fit_end", "teardown"):
        trainer.fit_loop.max_epochs = 2
    before = trainer.fit_loop.global_step
    trainer.fit(model)
    assert trainer.state.status == "finished" and trainer.global_step == before + 3
    assert (torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()) == flags


def test_an_error_while_tearing_down_hides_nothing(caplog):
    class Bad(Callback):
        def on_exception(self, trainer, module, exception):
            raise ValueError("on_exception")

        def teardown(self, trainer, module, stage):
            raise ValueError("teardown")

    class Late(Callback):
        torn = False

        def teardown(self, trainer, module, stage):
            self.torn = True

    late = Late()
    with pytest.raises(ZeroDivisionError, match="training_step"):
        fit(Fails("training_step"), None, None, Bad(), late)
    assert late.torn and "Bad.teardown failed too" in caplog.text and "Bad.on_exception failed" in caplog.text
    late = Late()
    trainer = make(Bad(), late)
    with pytest.raises(ValueError, match=r"^teardown$"):
        trainer.fit(Net(), batches())
    assert late.torn and trainer.state.status == "interrupted"


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_a_failing_evaluation_leaves_the_mode_as_it_was(fn):
    class Bad(Net):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

        test_step = predict_step = validation_step

    model = Bad()
    model.layer.eval()
    with pytest.raises(ZeroDivisionError):
        getattr(make(), fn)(model, batches(1))
    assert model.training and not model.layer.training and torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_global_flags_are_what_was_asked_for_and_then_what_they_were(fails, before):
    found = []

    class Look(Net):
        def training_step(self, batch, batch_idx):
            found.append(
                (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                    torch.is_anomaly_enabled(),
                )
            )
            if fails:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    torch.use_deterministic_algorithms(before[0])
    torch.autograd.set_detect_anomaly(before[1], check_nan=False)
    try:
        trainer = make(deterministic="warn", detect_anomaly=True)
        try:
            trainer.fit(Look(), batches(1))
        except ZeroDivisionError:
            assert fails
        assert found == [(True, True, True)]
        after = (torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled())
        assert after == before and not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)


def test_a_failed_resume_leaves_nothing_behind(tmp_path):
    trainer, _ = fit(Net(), batches(4), max_steps=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = make(max_steps=4)
    model = Fails("on_fit_start")
    with pytest.raises(ZeroDivisionError):
        again.fit(model, batches(4), ckpt_path=tmp_path / "a.ckpt")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again.fit(Net(), batches(4))  # without it, so nothing of it is restored
    assert torch.equal(torch.get_rng_state(), state) is False or again.global_step == 4
    assert again.run.progress.generators is None


def test_another_models_optimizers_are_not_saved_with_this_one(tmp_path):
    trainer, _ = fit(Net())
    other = Net()
    trainer.validate(other, batches(1), verbose=False)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["optimizer_states"] == [] and torch.equal(saved["state_dict"]["layer.weight"], other.layer.weight)


# -- checkpoints by name -----------------------------------------------------------------------------------------


class Scored(Net):
    def validation_step(self, batch, batch_idx):
        self.log("score", [3.0, 1.0, 2.0, 4.0][self.current_epoch])


def stamp(path, age):
    os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))


def test_best_and_last(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_last=True)
    trainer, model = fit(Scored(), None, batches(1), callback, max_epochs=4)
    final = model.layer.weight.item()
    results = []
    for path, epoch in (("best", 1), ("last", 3), (None, 3)):
        results.append(trainer.test(model, batches(1), ckpt_path=path, verbose=False)[0]["test_loss"])
        stored = torch.load(tmp_path / f"epoch={epoch}.ckpt" if epoch == 1 else tmp_path / "last.ckpt")
        assert model.layer.weight.item() == stored["state_dict"]["layer.weight"].item()
    assert results[0] != results[1] == results[2] and final == model.layer.weight.item()


def test_best_without_a_fit():
    for trainer in (make(), make(ModelCheckpoint("x"))):
        with pytest.raises(
            ConfigurationError,
            match="ckpt_path='best' needs a fit with this Trainer whose ModelCheckpoint found a best one",
        ):
            trainer.test(Net(), batches(1), ckpt_path="best")


def test_last_without_files(tmp_path):
    with pytest.warns(UserWarning, match="there is no checkpoint yet, so training starts from the beginning"):
        trainer = make(ModelCheckpoint(tmp_path))
        trainer.fit(Net(), batches(), ckpt_path="last")
    assert trainer.global_step == 2
    for fn in ("validate", "test", "predict"):
        empty = tmp_path / "empty"
        with pytest.raises(ConfigurationError, match=rf"'last' needs a checkpoint, and there is none in .*empty.*{fn}"):
            getattr(make(ModelCheckpoint(empty)), fn)(Net(), batches(1), ckpt_path="last")
    with pytest.raises(ConfigurationError, match="needs a ModelCheckpoint callback"):
        make().fit(Net(), batches(), ckpt_path="last")


@pytest.mark.parametrize("own", [True, False], ids=["own dirpath", "versioned folder"])
def test_last_is_the_newest_complete_one(tmp_path, own):
    def trainer(**options):
        where = {"dirpath": tmp_path} if own else {}
        checkpoint = ModelCheckpoint(filename="{step}", every_n_train_steps=2, save_top_k=-1, **where)
        return make(
            checkpoint, default_root_dir=tmp_path, **{"logger": not own, "enable_checkpointing": True, **options}
        )

    first = trainer(max_steps=6)
    first.fit(Net(), batches(9))
    folder = first.checkpoint_callback.dirpath
    newest = os.path.join(folder, "step=6.ckpt")
    with open(newest, "rb") as file:
        whole = file.read()
    with open(os.path.join(folder, "step=8.ckpt"), "wb") as file:  # cut off, and the newest by its time
        file.write(whole[: len(whole) // 2])
    with open(os.path.join(folder, ".step=9.ckpt.tmp"), "wb") as file:
        file.write(whole[:10])
    stamp(newest, 1000)  # a copied folder has other times
    second = trainer(max_steps=7)
    second.fit(Net(), batches(9), ckpt_path="last")
    assert second.ckpt_path == newest and second.global_step == 7
    third = trainer(max_steps=9)
    third.fit(Net(), batches(9), ckpt_path="last")
    assert third.global_step == 9


@pytest.mark.parametrize(
    "hook",
    ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward",
     "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end",
     "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end",
     "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"],
)  # fmt: skip
def test_a_checkpoint_may_be_saved_in_every_hook(tmp_path, hook):
    path = tmp_path / "a.ckpt"

    class Save(Callback):
        pass

    setattr(Save, hook, lambda self, trainer, *args: trainer.save_checkpoint(path))
    trainer, _ = fit(Net(), batches(3), batches(1), Save(), max_epochs=2)
    assert trainer.global_step == 6
    again = make(max_epochs=3)
    again.fit(Net(), batches(3), batches(1), ckpt_path=path)
    assert (again.global_step, again.current_epoch) == (9, 3)
    assert Net.load_from_checkpoint(path).layer.weight.shape == (1, 1)


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_step_returned_is_gone_before_the_next_one():
    alive = []

    class Big:
        """Stands for activations."""

    class Keeps(Net):
        def note(self, batch_idx):
            gc.collect()
            if alive:
                assert alive[-1]() is None, "the last step's output is still alive"
            big = Big()
            alive.append(weakref.ref(big))
            return big

        def training_step(self, batch, batch_idx):
            return {"loss": self.layer(batch).mean(), "big": self.note(batch_idx)}

        def validation_step(self, batch, batch_idx):
            return self.note(batch_idx)

        test_step = predict_step = validation_step

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert outputs["big"] is alive[-1]()

        def on_train_batch_start(self, batch, batch_idx):
            assert not alive or alive[-1]() is None

    trainer, model = fit(Keeps(), batches(3), batches(3))
    trainer.test(model, batches(3), verbose=False)
    trainer.predict(model, batches(3), return_predictions=False)
    assert len(alive) == 12


def test_nothing_of_a_run_is_kept_alive_by_the_next():
    trainer, model = fit(Net(), DataLoader(TensorDataset(torch.ones(4, 1)), collate_fn=lambda rows: rows[0][0]))
    gone = weakref.ref(model)
    trainer.validate(Net(), batches(1), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net(), batches())
    del model
    gc.collect()
    assert gone() is None


class Decaying(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.kept = self.optimizers()
        self.kept.zero_grad()
        self.manual_backward(self.layer(batch).pow(2).mean())
        self.kept.step()


class OwnStep(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.kept = optimizer
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Net, {}),
        (Decaying, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
        (ByHand, {}),
        (OwnStep, {}),
        (Scored, {"logger": True, "enable_checkpointing": True, "enable_progress_bar": True,
                  "enable_model_summary": True, "num_sanity_val_steps": 1}),
        (Net, {"strategy": "ddp"}),
    ],
    ids=["plain", "scheduler", "by hand", "own step", "everything on", "ddp"],
)  # fmt: skip
def test_a_trainer_and_its_model_go_without_a_garbage_collection(tmp_path, kind, options):
    stopping = [EarlyStopping("score", mode="max")] if kind is Scored else []
    gc.collect()
    gc.disable()
    try:
        model, data = kind(), Data()
        trainer = make(*stopping, default_root_dir=tmp_path, **{"enable_checkpointing": False, **options})
        trainer.fit(model, data)
        trainer.validate(model, data, verbose=False)
        trainer.predict(model, batches())
        gone = [weakref.ref(part) for part in (trainer, model, data, trainer.optimizers[0], trainer.strategy)]
        del trainer, model, data
        assert [reference() for reference in gone] == [None] * 5
        alone = weakref.ref(make())
        assert alone() is None
    finally:
        gc.enable()


def test_a_model_outlives_its_trainer():
    model, data = Net(), Data()
    make().fit(model, data)
    with pytest.raises(RuntimeError, match="Net is not attached to a Trainer"):
        _ = model.trainer
    assert data.trainer is None and model.current_epoch == 0 and model.logger is None
    by_hand = ByHand()
    trainer = make()
    trainer.fit(by_hand, batches())
    kept = by_hand.kept
    trainer.fit_loop.max_epochs = 2
    trainer.fit(by_hand, batches())
    with pytest.raises(ReferenceError, match="this SGD belongs to a fit that is over"):
        kept.step()


@pytest.mark.parametrize("options", [{}, {"strategy": "ddp"}, {"logger": True, "num_workers": 1}], ids=str)
def test_no_thread_and_no_variable_outlives_a_fit(tmp_path, monkeypatch, options):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    workers = options.pop("num_workers", 0)
    during = set()

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            during.update(thread.name for thread in threading.enumerate())

    # torch writes TORCHINDUCTOR_CACHE_DIR into the environment with a process' first optimizer.
    torch.optim.SGD(Net().parameters())
    threads, variables = threading.enumerate(), dict(os.environ)
    loader = DataLoader(torch.ones(4, 1), num_workers=workers)
    fit(Net(), loader, loader, Look(), default_root_dir=tmp_path, **options)
    assert "torchhal-signals" in during
    # A DataLoader tells the threads that feed its workers to end, and doesn't wait for them.
    for thread in set(threading.enumerate()) - set(threads):
        if thread.name == "QueueFeederThread":
            thread.join()
    assert threading.enumerate() == threads and dict(os.environ) == variables


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_thread_ends_though_a_forked_child_has_its_pipe():
    reading, writing = os.pipe()
    children = []

    class Forks(Callback):
        def on_train_start(self, trainer, module):
            pid = os.fork()
            if pid == 0:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
            children.append(pid)

    threads = threading.enumerate()
    try:
        fit(Net(), None, None, Forks())
        assert threading.enumerate() == threads
    finally:
        os.close(writing)
        for pid in children:
            os.waitpid(pid, 0)
        os.close(reading)


def test_a_strategy_may_wrap_the_bodies_of_hooks():
    """Those of callbacks and the model, for as long as it says; a copy of the Trainer has none of it."""

    class Ends(Callback):
        def on_train_epoch_end(self, trainer, module):
            called.append("callback")

    class Model(Module):
        def on_train_epoch_end(self):
            called.append("model")

    called = []
    trainer = make(Ends())
    trainer.module = Model()
    trainer.hooks.call("on_train_epoch_end")
    trainer.hooks.wrap(lambda name, body: lambda *args: (called.append(name), body(*args)))
    trainer.hooks.call("on_train_epoch_end")
    assert called == ["callback", "model", *["on_train_epoch_end", "callback"], *["on_train_epoch_end", "model"]]
    assert trainer.hooks.of_module("on_train_epoch_start") is None and not trainer.hooks.has("on_train_epoch_start")
    assert trainer.hooks.__getstate__()["_around"] is None
    trainer.hooks.wrap(None)
    trainer.hooks.call("on_train_epoch_end")
    assert called[6:] == ["callback", "model"]
