"""Test what a model's steps may take and return, which pieces of them it may replace, and manual optimization."""

import functools

import hardware
import pytest
import torch
from full_net import Net, batches, fit
from quiet_trainer import make
from torch import nn
from torch.utils.data import DataLoader

from torchhal import DataModule, Module
from torchhal.errors import (
    ConfigurationError,
    ModelError,
)

pytestmark = pytest.mark.usefixtures("accelerator")


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


# -- overridden pieces of the step -------------------------------------------------------------------------------


def test_overridden_step_methods():
    """A model may replace backward, zero_grad and clipping."""

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
