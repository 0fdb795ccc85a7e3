"""What a precision's ``connect`` gives back is what trains: optimizers, schedulers, and the model."""

import copy

import hardware
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from torchhal import Module, Trainer
from torchhal.errors import ConfigurationError
from torchhal.precision import MixedPrecision, SinglePrecision

pytestmark = pytest.mark.usefixtures("accelerator")


class VendorsOptimizer:
    """Steps in another's place, as fused optimizers of vendors do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        return self.optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)


class VendorsScheduler:
    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.steps = 0

    def step(self, *args):
        self.steps += 1
        self.scheduler.step(*args)

    def __getattr__(self, name):
        return getattr(self.__dict__["scheduler"], name)


class Connects(SinglePrecision):
    def connect(self, model=None, optimizers=(), lr_schedulers=()):
        for config in lr_schedulers:
            config.scheduler = VendorsScheduler(config.scheduler)
        self.given = [VendorsOptimizer(optimizer) for optimizer in optimizers]
        return model, self.given, lr_schedulers


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        loss = self(batch).pow(2).mean()
        self.log("loss", loss)
        self.epochs = self.trainer.current_epoch
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


def data():
    return DataLoader(torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(4)), None)


def fit(model, precision, **options):
    trainer = Trainer(
        **{"accelerator": hardware.name(), "devices": 1, "max_epochs": 1, **options}, plugins=[precision], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data(), data())
    return trainer


def plain():
    model = Net()
    trainer = fit(model, SinglePrecision())
    assert trainer.global_step == 8
    return model


@pytest.mark.parametrize("model", [Net, ByHand])
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_connected_optimizer_steps(model, strategy):
    """The optimizer that the precision gives is the one that steps."""
    precision, trained = Connects(), model()
    trainer = fit(trained, precision, strategy=strategy)
    assert trainer.global_step == 8
    assert [optimizer.steps for optimizer in precision.given] == [8]
    assert trainer.optimizers == precision.given
    assert [config.scheduler.steps for config in trainer.lr_scheduler_configs] == [8]
    for found, wanted in zip(trained.parameters(), plain().parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_it_is_saved_and_resumed(tmp_path):
    trainer = fit(Net(), Connects(), max_steps=5)
    trainer.save_checkpoint(tmp_path / "five.ckpt")
    precision, model = Connects(), Net()
    trainer = Trainer(
        accelerator=hardware.name(), devices=1, max_epochs=1, plugins=[precision], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data(), ckpt_path=tmp_path / "five.ckpt")
    assert [optimizer.steps for optimizer in precision.given] == [3]
    for found, wanted in zip(model.parameters(), plain().parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


class Around(nn.Module):
    """A wrapper without the module's steps, which notes what runs through it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.forwards = 0

    def forward(self, *args):
        self.forwards += 1
        return self.inner(*args)


class Wraps(SinglePrecision):
    def connect(self, model=None, optimizers=(), lr_schedulers=()):
        self.around = Around(model)
        return self.around, optimizers, lr_schedulers


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_training_step_runs_through_wrapper(strategy):
    """A training step runs through the wrapper that the precision gives."""
    precision, model = Wraps(), Net()
    fit(model, precision, strategy=strategy)
    assert precision.around.forwards == 8
    assert isinstance(precision.around.inner, DistributedDataParallel) == (strategy == "ddp")
    for found, wanted in zip(model.parameters(), plain().parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


class InPlace(SinglePrecision):
    """Puts another model in the user's place, over the same parameters."""

    def connect(self, model=None, optimizers=(), lr_schedulers=()):
        self.other = copy.copy(model)
        self.other.__dict__["_trainer"] = None
        self.other.calls = 0
        step = self.other.training_step

        def counted(*args):
            self.other.calls += 1
            return step(*args)

        self.other.training_step = counted
        return self.other, optimizers, lr_schedulers


def test_replaced_model_knows_trainer():
    """A model that the precision puts in the place of the user's knows its Trainer."""
    precision, model = InPlace(), Net()
    trainer = fit(model, precision)
    assert precision.other.calls == 8
    assert trainer.lightning_module is precision.other
    assert precision.other.trainer is trainer
    assert "loss" in trainer.callback_metrics and "val" in trainer.callback_metrics
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data())
    assert precision.other.calls == 8 and trainer.global_step == 16, "another one for another run"


class Converts(SinglePrecision):
    def convert_module(self, module):
        self.copy = copy.deepcopy(module)
        return self.copy


def test_converted_copy_is_optimized():
    """The converted copy is optimized and knows its Trainer."""
    precision = Converts()
    trainer = fit(Net(), precision)
    assert trainer.lightning_module is precision.copy and precision.copy.trainer is trainer
    for found, wanted in zip(precision.copy.parameters(), plain().parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_autocast_is_kept_around_what_it_gives():
    class Both(MixedPrecision):
        connect = Connects.connect

    precision = Both("bfloat16")
    trainer = fit(Net(), precision)
    assert trainer.global_step == 8 and precision.given[0].steps == 8


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda model, optimizers, schedulers: None, r"must return \(model, optimizers, lr_schedulers\) \(got None\)"),
        (lambda model, optimizers, schedulers: (model, optimizers), r"\(model, optimizers, lr_schedulers\) \(got \("),
        (lambda model, optimizers, schedulers: (model, [], schedulers), r"1 optimizer\(s\) and 1 .* \(got 0 and 1\)"),
        (lambda model, optimizers, schedulers: (model, [nn.Linear(1, 1)], schedulers), r"Linear is no optimizer"),
        (lambda model, optimizers, schedulers: (model, optimizers, [object()]), r"a SchedulerConfig.*\(got a object\)"),
        (lambda model, optimizers, schedulers: (nn.Linear(1, 1), optimizers, schedulers), r"in its place.*got Linear"),
        (lambda model, optimizers, schedulers: (None, optimizers, schedulers), r"must return the model.*got NoneType"),
    ],
)
def test_something_else_is_refused_by_name(answer, said):
    class Odd(SinglePrecision):
        def connect(self, model=None, optimizers=(), lr_schedulers=()):
            return answer(model, optimizers, lr_schedulers)

    with pytest.raises(ConfigurationError, match=rf"Odd\.connect .*{said}"):
        fit(Net(), Odd())
