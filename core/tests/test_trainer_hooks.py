"""Test the order of a Trainer's hooks, their arguments and the state at each of them."""

import functools

import pytest
import torch
from full_net import Net, batches, fit
from quiet_trainer import make
from torch.utils.data import DataLoader

from torchhal import Callback, Module

pytestmark = pytest.mark.usefixtures("accelerator")


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
def test_evaluation_hooks_dataloader_idx(fn, word, several):
    """Evaluation hooks get dataloader_idx if they take it."""
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


def test_outputs_are_detached():
    """Hooks get the outputs of a training_step without their graph."""
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


def test_strategy_wraps_hook_bodies():
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
