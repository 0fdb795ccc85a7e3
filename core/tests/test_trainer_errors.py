"""Test that models, data, losses and folders that can't work are refused by name, before they cost anything."""

import errno
import gc
import os
import re
import warnings
import weakref

import pytest
import torch
from minimal_net import BATCHES, INF, NAN, Net, refuse_to_start, script
from quiet_trainer import make
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, DataModule, Module
from torchhal.errors import (
    CheckpointError,
    ConfigurationError,
    ModelError,
    NonFiniteLossError,
)
from torchhal.trainer.callbacks import ModelCheckpoint

# -- before any process starts -----------------------------------------------------------------------------------


class NoStep(Module):
    configure_optimizers = Net.configure_optimizers


class NoOptimizers(Module):
    def training_step(self, batch, batch_idx):
        pass


class Empty(Module):
    """No evaluation steps."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: t.fit(NoStep(), BATCHES),
            r"NoStep can't be fitted: it has no training_step\. Define one that takes",
        ),
        (lambda t: t.fit(NoOptimizers(), BATCHES), r"it has no configure_optimizers\. Define one that returns"),
        (lambda t: t.fit(nn.Linear(1, 1), BATCHES), r"Linear can't be fitted: it has no training_step"),
        (lambda t: t.fit(Net, BATCHES), r"'model' must be a torch\.nn\.Module \(got <class .*Net'>\)"),
        (lambda t: t.fit(None, BATCHES), r"'model' must be a torch\.nn\.Module \(got None\)"),
        (lambda t: t.fit(lambda x: x, BATCHES), r"'model' must be a torch\.nn\.Module"),
        (lambda t: t.fit(Net()), r"fit needs training data: pass train_dataloaders or a datamodule, or define"),
        (lambda t: t.fit(Net(), 5), r"'train_dataloaders' must be an iterable of batches.*\(got 5\)"),
        (lambda t: t.fit(Net(), "path"), r"'train_dataloaders' must be an iterable of batches.*\(got 'path'\)"),
        (lambda t: t.fit(Net(), DataLoader), r"'train_dataloaders' must be an iterable of batches"),
        (lambda t: t.fit(Net(), TensorDataset(torch.ones(3))), r"'train_dataloaders' must be an iterable of batches"),
        (
            lambda t: t.fit(Net(), {"a": DataLoader(torch.ones(3, 1))}),
            r"'train_dataloaders' must be an iterable .*combine the loaders in one",
        ),
        (
            lambda t: t.fit(Net(), [DataLoader(torch.ones(3, 1))] * 2),
            r"must be one iterable of batches \(got a list of 2 loader\(s\)\): combine them in one",
        ),
        (
            lambda t: t.fit(Net(), [DataLoader(torch.ones(3, 1))]),
            r"\(got a list of 1 loader\(s\)\): pass that loader itself",
        ),
        (lambda t: t.fit(Net(), BATCHES, 5), r"'val_dataloaders' must be an iterable of batches.*\(got 5\)"),
        (lambda t: t.fit(Net(), datamodule=3), r"'datamodule' must be a DataModule, or have one of .*\(got 3\)"),
        (lambda t: t.fit(Net(), datamodule=DataLoader(torch.ones(3, 1))), r"must be .*; loaders go into the arguments"),
        (lambda t: t.fit(Net(), datamodule=DataModule), r"'datamodule' must be a DataModule .*: make an object"),
        (lambda t: t.test(Net(), datamodule=3), r"'datamodule' must be a DataModule"),
        (lambda t: t.validate(), r"validate needs a model: pass one, or fit one with this Trainer first"),
        (lambda t: t.test(Net(), BATCHES), r"Net has no test_step: define it to test"),
        (lambda t: t.validate(Empty(), BATCHES), r"Empty has no validation_step: define it to validate"),
        (lambda t: t.predict(Empty(), BATCHES), r"Empty has no predict_step: define it to predict"),
        (lambda t: t.validate(Net()), r"validate needs data: pass dataloaders or a datamodule"),
        (lambda t: t.validate(Net(), 5), r"'dataloaders' must be an iterable of batches.*\(got 5\)"),
        (lambda t: t.save_checkpoint("x"), r"save_checkpoint needs a model"),
    ],
)
def test_a_model_or_data_that_lacks_something(monkeypatch, call, message):
    refuse_to_start(monkeypatch)
    with pytest.raises(ModelError, match=message):
        call(make())


# -- data that gives nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loader",
    [[], DataLoader(torch.ones(0, 1)), DataLoader(torch.ones(3, 1), batch_size=9, drop_last=True), iter([])],
    ids=["list", "empty", "drop_last", "iterator"],
)
@pytest.mark.usefixtures("accelerator")
def test_a_loader_that_yields_nothing(loader):
    model = Net()
    with pytest.raises(ModelError, match=r"the training loader.* gave no batch: "):
        make().fit(model, loader)
    if isinstance(loader, DataLoader):
        with pytest.raises(ModelError, match=r"the loader of 'val_dataloaders' gave no batch: is the dataset empty"):
            make().fit(model, BATCHES, loader)
        with pytest.raises(ModelError, match="the loader of 'dataloaders' gave no batch"):
            make().validate(model, loader)
        with pytest.raises(ModelError, match="a loader of 'dataloaders' gave no batch"):
            make().validate(model, [DataLoader(torch.ones(1, 1)), loader])


def test_a_loader_hook_that_returns_nothing():
    class Nothing(Net):
        def train_dataloader(self):
            pass

        val_dataloader = train_dataloader

    with pytest.raises(ModelError, match=r"train_dataloader returned None"):
        make().fit(Nothing())
    with pytest.raises(ModelError, match=r"validate needs data: its loader is None"):
        make().validate(Nothing())


@pytest.mark.usefixtures("accelerator")
def test_a_compiled_model_is_compiled_in_place():
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    class Called(Net):
        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, batch_idx):
            return self(batch).pow(2).mean()

    model = Called()
    with pytest.raises(ModelError, match=r"must be the Called itself.*model\.compile"):
        make().fit(torch.compile(model, backend=backend), BATCHES)
    weight = model.layer.weight.detach().clone()
    model.compile(backend=backend)
    make().fit(model, BATCHES)
    assert graphs and list(model.state_dict()) == ["layer.weight", "layer.bias"]
    assert not torch.equal(weight, model.layer.weight.cpu())


def test_unused_validation_data_warns():
    """Validation data without a validation_step is not used, with a warning."""
    model = Net()
    model.validation_step = None
    with pytest.warns(UserWarning, match="Net has no validation_step, so val_dataloaders is not used") as caught:
        make().fit(model, BATCHES, BATCHES)
    assert caught[0].filename == __file__, "the line that called"


# -- losses ------------------------------------------------------------------------------------------------------


def step(function, **options):
    model = type("Bad", (Net,), {"training_step": lambda self, batch, batch_idx: function(self, batch)})()
    make(**options).fit(model, BATCHES)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, b: m.layer(b), r"Bad\.training_step must return one number.*\(2, 1\)\): take its mean"),
        (lambda m, b: {"loss": m.layer(b)}, r"must return one number.*\(2, 1\)"),
        (lambda m, b: torch.tensor(1.0), r"depends on no trainable parameter: nothing requires grad"),
        (lambda m, b: m.layer(b).mean().detach(), r"depends on no trainable parameter"),
        (lambda m, b: {"losses": 1}, r"must return a tensor, a dict with 'loss', or None \(got a dict with 'losses'\)"),
        (lambda m, b: {}, r"\(got a dict with nothing\)"),
        (lambda m, b: 3.5, r"must return a tensor, a dict with 'loss', or None \(got 3\.5\)"),
        (lambda m, b: "loss", r"\(got 'loss'\)"),
        (lambda m, b: [m.layer(b).mean()], r"must return a tensor, a dict with 'loss', or None \(got \["),
    ],
)
@pytest.mark.usefixtures("accelerator")
def test_what_training_step_may_not_return(function, message):
    with pytest.raises(ModelError, match=message):
        step(function)


def loss_after(act):
    def training_step(model, batch):
        loss = model.layer(batch).pow(2).mean()
        act(model, loss)
        return loss

    return training_step


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda m, loss: m.optimizers().step(), r"Bad steps SGD by hand, and the Trainer steps it too"),
        (lambda m, loss: m.manual_backward(loss), r"Bad\.manual_backward needs manual optimization"),
        (lambda m, loss: loss.backward(), r"leave loss\.backward\(\) out of training_step.* a second time"),
    ],
    ids=["step", "manual_backward", "backward"],
)
@pytest.mark.usefixtures("accelerator")
def test_manual_calls_in_automatic_optimization(act, message):
    """Steps and backward passes by hand are refused where the Trainer makes them."""
    with pytest.raises(ModelError, match=message):
        step(loss_after(act))


def test_graph_kept_across_batches():
    """The error for a graph that is kept from an earlier batch says what to detach."""

    class Recurrent(Net):
        kept = 0.0

        def training_step(self, batch, batch_idx):
            self.kept = self.layer(batch).pow(2).mean() + self.kept
            return self.kept

    with pytest.raises(ModelError, match=r"graph of the loss .* has been used up: .*detach\(\) what is kept"):
        make().fit(Recurrent(), BATCHES)


def test_load_from_checkpoint_on_instance(tmp_path):
    """load_from_checkpoint makes a new object, so that a call on an instance is refused."""
    trainer, model = make(), Net()
    trainer.fit(model, BATCHES)
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    with pytest.raises(ModelError, match=r"leaves this one as it is: write model = Net\.load_from_checkpoint"):
        model.load_from_checkpoint(tmp_path / "net.ckpt")

    class Own(Net):
        @classmethod
        def load_from_checkpoint(cls, path):
            return super().load_from_checkpoint(path)

    assert type(Own.load_from_checkpoint(tmp_path / "net.ckpt")) is Own


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.usefixtures("accelerator")
def test_a_loss_that_is_not_finite(value, accumulate):
    class Explodes(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * value if (self.current_epoch, batch_idx) == (1, 3) else loss

    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    model = Explodes()
    with pytest.raises(NonFiniteLossError) as caught:
        make(detect_anomaly=True, **options).fit(model, BATCHES * 3)
    found = re.search(r"the loss is (\S+) at epoch 1, batch 3, optimizer step (\d+), rank 0", str(caught.value))
    assert found is not None and found[1] in ("nan", "inf", "-inf") and int(found[2]) == (9 if accumulate == 1 else 4)
    assert torch.isfinite(model.layer.weight).all()  # before the step that would have spread it
    make(**options).fit(Explodes(), BATCHES * 3)  # nobody asked


@pytest.mark.usefixtures("accelerator")
def test_closure_optimizer_does_not_accumulate():
    """An optimizer with a closure does not accumulate."""

    class Closure(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match=r"'accumulate_grad_batches' must be 1 for LBFGS.*\(got 2\)"):
        make(accumulate_grad_batches=2).fit(Closure(), BATCHES)

    class Skips(Closure):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ModelError, match=r"Skips\.training_step must return a loss for LBFGS.*\(got None\)"):
        make().fit(Skips(), BATCHES)


class Forgets(Net):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)  # and no return


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("limits", [{"max_epochs": 1000}, {"max_epochs": -1, "max_steps": 10}], ids=["epochs", "steps"])
def test_loss_never_returned(limits, accumulate):
    """A training_step that never returns a loss ends the run soon."""
    said = r"Forgets\.training_step has returned None.* for each of the {} batch\(es\) since fit began.*return the loss"
    with (
        pytest.warns(UserWarning, match=said.format(2)),
        pytest.raises(ModelError, match=said.format(4)),
    ):
        make(**limits, accumulate_grad_batches=accumulate).fit(Forgets(), BATCHES)


def test_missing_loss_warns_within_epoch():
    """In a long epoch the warning of missing losses comes before the end."""
    batches, seen = [], []

    class Counts(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(list(caught))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [torch.ones(2, 1)] * 120
        make(Counts()).fit(Forgets(), batches)
    assert [bool(any("for each of the 100" in str(w.message) for w in then)) for then in seen].index(True) == 99


def test_batches_without_loss_are_skipped():
    """Some batches without a loss are left out in silence."""

    class Sometimes(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if self.current_epoch == 1 and batch_idx == 1 else None

    with pytest.warns(UserWarning, match="for each of the 2 batch"):  # the first epoch had none
        trainer = make(max_epochs=6)
        trainer.fit(Sometimes(), BATCHES)
    assert (trainer.global_step, trainer.current_epoch) == (1, 6)


# -- checkpoints that can't be written ---------------------------------------------------------------------------


@pytest.mark.usefixtures("accelerator")
def test_a_full_disk_surfaces_and_costs_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    trainer = make()
    trainer.fit(Net(), BATCHES)
    trainer.save_checkpoint(path)
    old = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"(?i)a\.ckpt.*no space left"):
        trainer.save_checkpoint(path)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["a.ckpt"]
    saver = make(ModelCheckpoint(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"(?i)no space left"):
        saver.fit(Net(), BATCHES)
    assert saver.state.status == "interrupted" and saver.checkpoint_callback.best_model_path == ""
    monkeypatch.undo()
    assert Net.load_from_checkpoint(path).layer.weight.shape == (1, 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_no_success(tmp_path):
    target = tmp_path / "out"
    target.mkdir(mode=0o500)
    done = script(tmp_path, "trainer(ModelCheckpoint(folder), max_epochs=1).fit(Net(), BATCHES)")
    assert done.returncode == 1 and "CheckpointError" in done.stderr and str(target) in done.stderr


def test_file_in_place_of_folder(tmp_path):
    """A folder that is a file is an error before the first step."""
    (tmp_path / "out").write_text("in the way")
    done = script(
        tmp_path,
        """
        announce = At("on_train_batch_start", lambda trainer: print("a step"))
        trainer(announce, ModelCheckpoint(os.path.join(folder, "below")), max_epochs=1).fit(Net(), BATCHES)
        """,
    )
    assert done.returncode == 1 and "CheckpointError" in done.stderr and str(tmp_path / "out") in done.stderr
    assert "a step" not in done.stdout
    assert (tmp_path / "out").read_text() == "in the way"


# -- signals -----------------------------------------------------------------------------------------------------


def test_failed_run_releases_last_batch():
    """The trainer lives on, perhaps to try again with a smaller one: a device would still hold it."""

    class Fails(Net):
        def training_step(self, batch, batch_idx):
            self.batch = weakref.ref(batch)
            raise RuntimeError("out of memory")

    trainer, model = make(), Fails()
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        trainer.fit(model, DataLoader(torch.ones(2, 1)))
    del caught
    gc.collect()
    assert model.batch() is None
