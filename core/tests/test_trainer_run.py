"""Test that a Trainer is as free as any object, though its state lies in a Run."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from torchhal import Module, Trainer
from torchhal.strategies import SingleDeviceStrategy, StepResult


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fails(Net):
    def training_step(self, batch, batch_idx):
        raise ZeroDivisionError


def make(kind=Trainer, **options):
    return kind(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def batches():
    return DataLoader(torch.ones(8, 1), 1)


def test_attribute_run_is_the_users():
    trainer = make()
    trainer.run = "of an experiment tracker"
    trainer.fit(Net(), batches())
    assert (trainer.run, trainer.global_step) == ("of an experiment tracker", 8)


def test_subclass_may_have_method_run_and_set_attributes_first():
    class Mine(Trainer):
        def __init__(self, **options):
            self.callbacks = []
            super().__init__(**options)

        def run(self, model):
            self.fit(model, batches())

    trainer = make(Mine)
    trainer.run(Net())
    assert trainer.global_step == 8


def test_setting_of_class_refused():
    with pytest.raises(TypeError, match=r"Mine can't have the setting 'max_epochs' as an attribute of the class"):
        type("Mine", (Trainer,), {"max_epochs": 5})


@pytest.mark.parametrize(("name", "value"), [("callbacks", []), ("should_stop", True), ("module", None)])
def test_attributes_can_be_patched(name, value):
    trainer = make()
    before = getattr(trainer, name)
    with mock.patch.object(trainer, name, value):
        assert getattr(trainer, name) is value
    assert getattr(trainer, name) is before


def test_copies_have_runs_of_their_own():
    trainer = make()
    trainer.fit(Net(), batches())
    for copied in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        copied.max_epochs = 3
        copied.fit(Net(), batches())
        assert (copied.global_step, trainer.global_step, trainer.max_epochs) == (24, 8, 1)
    with pytest.raises(TypeError, match="would share its run"):
        copy.copy(trainer)


def test_signature_is_the_constructors():
    assert {"accelerator", "strategy", "max_epochs"} <= set(inspect.signature(Trainer).parameters)


def test_failed_fit_freed_without_gc():
    make().fit(Net(), batches())  # the first optimizer of a process keeps frames by itself
    gc.collect()
    gc.disable()
    try:
        model, trainer = Fails(), make()
        remains = weakref.ref(model)
        with pytest.raises(ZeroDivisionError) as caught:
            trainer.fit(model, batches())
        del model, trainer, caught
        assert remains() is None
    finally:
        gc.enable()


def test_step_result_is_true_where_parameters_changed():
    """As the bool was that ``super().optimizer_step()`` returned before."""
    assert (bool(StepResult.UPDATED), bool(StepResult.SKIPPED), bool(StepResult.NOT_DUE)) == (True, False, False)


@pytest.mark.parametrize("value", [torch.tensor(0.3), 7.9, -2, "1"])
def test_result_that_is_no_step_refused(value):
    """A loss, say, which the closure returned: it would have been taken for a number of steps."""

    class Ported(SingleDeviceStrategy):
        def optimizer_step(self, optimizer, closure=None):
            super().optimizer_step(optimizer, closure)
            return value

    with pytest.raises(TypeError, match=r"optimizer_step of a strategy must return a StepResult, a bool, None"):
        make(strategy=Ported()).fit(Net(), batches())
