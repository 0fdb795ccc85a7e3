"""Objects of another framework run through its model adapter, which is found by where their classes come from."""

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Trainer, registry
from torchhal.errors import CheckpointMismatchError, ConfigurationError
from torchhal.testing import isolated_registry
from torchhal.trainer.adapters import ModelAdapter, declares_hooks, implements


def framework(name="acme"):
    """A package with base classes that name every hook, step and loader."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.calls = []

        def training_step(self, batch, batch_idx):
            raise NotImplementedError

        def validation_step(self, batch, batch_idx):
            raise NotImplementedError

        def val_dataloader(self):
            raise NotImplementedError

        def on_train_start(self):
            raise AssertionError("it is nobody's")

        def predict_step(self, batch, batch_idx):
            return self.weight + batch[0]

        def configure_optimizers(self):
            raise NotImplementedError

    class Callback:
        def on_train_start(self, engine, model):
            raise AssertionError("it is nobody's")

        def on_train_epoch_end(self, engine, model):
            raise AssertionError("it is nobody's")

    module = types.ModuleType(name)

    class Parts:
        """Hardware as the framework describes it."""

    for cls in (Model, Callback, Parts):
        cls.__module__ = name
        setattr(module, cls.__name__, cls)
    return module


class Engine:
    """What the framework's objects expect of a Trainer."""

    def __init__(self, run):
        self.run = run
        self.epoch_number = property(lambda self: run.current_epoch)


class AcmeAdapter(ModelAdapter):
    """Adapts the package above, and notes what it is asked."""

    def __init__(self, run):
        super().__init__(run)
        self.engine = Engine(run)
        self.hooks, self.prepared, self.ends = [], 0, 0
        acme = sys.modules["acme"]
        declares_hooks(acme.Model, but=("predict_step",))
        declares_hooks(acme.Callback)
        made.append(self)

    @property
    def trainer(self):
        return self.engine

    def prepare_model(self, model):
        self.prepared += 1

    def end_run(self):
        self.ends += 1

    def follow_hook(self, name):
        self.hooks.append(name)

    def kind_of_callback(self, callback):
        return "checkpoint" if type(callback).__name__ == "Saver" else None

    def wrap_optimizer(self, optimizer):
        optimizer.is_acme = True
        return optimizer

    def on_save_checkpoint(self, checkpoint):
        checkpoint["acme"] = 1

    def adapt_request(self, request):
        self.requests = [*getattr(self, "requests", []), request]
        return replace(request, strategy="single_device", precision=None, plugins=["64-true"])

    def adapt_checkpoint(self, checkpoint, path):
        assert path.endswith(".ckpt")
        return {**checkpoint["inside"], "torchhal_format": 1} if "inside" in checkpoint else checkpoint

    def set_training_mode(self, model):
        self.modes = [model.training]


made = []


@pytest.fixture
def acme(monkeypatch):
    made.clear()
    module = framework()
    monkeypatch.setitem(sys.modules, "acme", module)
    with isolated_registry():
        registry.register("model_adapter", "acme", AcmeAdapter)
        yield module


def line(base):
    """Return a model of one weight, of a framework's base class or of torchhal's."""

    class Line(base):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def training_step(self, batch, batch_idx):
            return (self.weight - batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Line()


def loader():
    return DataLoader(TensorDataset(torch.arange(8.0).unsqueeze(1)), 2)


QUIET = {
    "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def test_a_run_goes_through_the_adapter(acme, tmp_path):
    class Line(acme.Model):
        trainer = None

        def training_step(self, batch, batch_idx):
            self.calls.append(type(self.trainer).__name__)
            return (self.weight - batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Saver(acme.Callback):
        def on_train_epoch_end(self, engine, model):
            model.calls.append(("callback", type(engine).__name__))

    model = Line()
    trainer = Trainer(callbacks=[Saver()], default_root_dir=tmp_path, **QUIET)
    trainer.fit(model, loader())
    (adapter,) = made
    assert model.calls == ["Engine"] * 4 + [("callback", "Engine")]
    assert adapter.prepared == 1 and adapter.ends == 1
    assert "training_step" in adapter.hooks and adapter.hooks[-1] is None
    assert [type(each).__name__ for each in trainer.callbacks] == ["Saver"]  # and no ModelCheckpoint beside it
    assert trainer.checkpoint_callback is trainer.callbacks[0]
    path = tmp_path / "own.ckpt"
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["acme"] == 1
    assert implements(model, "predict_step") and not implements(model, "validation_step")
    assert len(trainer.predict(model, loader())) == 4


def test_a_callback_alone_has_its_adapter(acme):
    """Beside a model of torchhal's, which gets the Trainer itself."""
    seen = []

    class Watch(acme.Callback):
        def on_train_start(self, engine, model):
            seen.append((type(engine).__name__, type(model.trainer).__name__))

    Trainer(callbacks=[Watch()], enable_checkpointing=False, **QUIET).fit(line(torchhal.Module), loader())
    assert seen == [("Engine", "Trainer")]


def test_an_adapter_that_fails_at_the_end_costs_no_tear_down(acme, monkeypatch, caplog):
    def fail(self):
        raise OSError("at the end")

    monkeypatch.setattr(AcmeAdapter, "end_run", fail)

    trainer = Trainer(enable_checkpointing=False, **QUIET)
    trainer.fit(line(acme.Model), loader())
    assert not trainer.strategy.is_set_up and "AcmeAdapter.end_run failed" in caplog.text


def test_torchhals_checkpoints_beside_those_of_another_framework(acme, tmp_path):
    class Saver(acme.Callback):
        pass

    callbacks = [Saver(), torchhal.ModelCheckpoint(tmp_path)]
    trainer = Trainer(callbacks=callbacks, default_root_dir=tmp_path, **QUIET)
    trainer.fit(line(acme.Model), loader())
    assert [type(each).__name__ for each in trainer.checkpoint_callbacks] == ["Saver", "ModelCheckpoint"]
    assert callbacks[1].best_model_path


def test_models_of_torchhal_and_of_nobody_need_none(acme):
    trainer = Trainer(enable_checkpointing=False, **QUIET)
    trainer.fit(line(torchhal.Module), loader())
    assert not made


@pytest.mark.parametrize("argument", ["strategy", "precision", "accelerator", "plugins"])
def test_parts_of_the_framework_are_arguments(acme, argument):
    """The adapter is asked once for all of them, and for nobody else's."""
    parts = acme.Parts()
    value = [parts, acme.Parts()] if argument == "plugins" else parts
    options = {**QUIET, argument: value, "enable_checkpointing": False}
    if argument == "accelerator":
        with pytest.raises(ConfigurationError, match="'accelerator' must be"):  # the adapter left it
            Trainer(**options)
        return
    strategy = Trainer(**options).strategy
    assert (strategy.alias, strategy.precision.alias) == ("single_device", "64-true")
    assert len(made[0].requests) == 1 and getattr(made[0].requests[0], argument) is value


def test_nobody_is_asked_for_aliases(acme):
    Trainer(**QUIET, strategy="single_device", plugins=["32-true"], enable_checkpointing=False)
    assert not made


def test_checkpoints_of_the_framework_are_continued(acme, tmp_path):
    trainer = Trainer(enable_checkpointing=False, **QUIET)
    trainer.fit(line(acme.Model), loader())
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    inside = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    del inside["digests"]
    path = tmp_path / "theirs.ckpt"
    torch.save({"state_dict": inside["state_dict"], "inside": inside, "epoch": 0, "optimizer_states": []}, path)
    results = []
    for ckpt in (tmp_path / "ours.ckpt", path):
        model = line(acme.Model)
        trainer = Trainer(**{**QUIET, "max_epochs": 3}, enable_checkpointing=False)
        trainer.fit(model, loader(), ckpt_path=ckpt)
        results.append((model.weight.item(), trainer.global_step))
    assert results[0] == results[1]
    with pytest.raises(CheckpointMismatchError, match="written by another library"):
        Trainer(**QUIET, enable_checkpointing=False).fit(line(torchhal.Module), loader(), ckpt_path=path)


def test_the_adapter_decides_on_the_mode(acme):
    model = line(acme.Model).eval()
    Trainer(enable_checkpointing=False, **QUIET).fit(model, loader())
    assert made[0].modes == [False] and not model.training
