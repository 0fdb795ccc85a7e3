"""GradientAccumulationScheduler: batches per optimizer step, from epoch to epoch."""

import pytest
import torch
from quiet_trainer import make
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Callback, Module, Trainer
from torchhal.errors import ConfigurationError
from torchhal.strategies import SingleDeviceStrategy
from torchhal.trainer.callbacks import GradientAccumulationScheduler, LambdaCallback


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.steps = []
        self.estimated = None

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def on_before_optimizer_step(self, optimizer):
        self.steps.append((self.trainer.current_epoch, self.trainer.fit_loop.batch_idx))

    def configure_optimizers(self):
        self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.Adam(self.parameters(), lr=0.1)


ROWS = torch.randn(14, 2, generator=torch.Generator().manual_seed(1))


def loader():
    return DataLoader(ROWS, 2)  # 7 batches


def fit(*callbacks, model=None, ckpt_path=None, **options):
    model = model or Net()
    trainer = make(*callbacks, **{"max_epochs": 3, **options})
    trainer.fit(model, loader(), ckpt_path=ckpt_path)
    return trainer, model


def test_sets_the_batches_per_step():
    trainer, model = fit(GradientAccumulationScheduler({0: 4, 2: 2}))
    assert model.steps == [(0, 3), (0, 6), (1, 3), (1, 6), (2, 1), (2, 3), (2, 5), (2, 6)]
    assert model.estimated == trainer.global_step == 8
    assert trainer.accumulate_grad_batches == 1, "the next fit begins with the Trainer's own"


def test_begins_with_one_batch():
    callback = GradientAccumulationScheduler({1: 7})
    assert [callback.get_accumulate_grad_batches(epoch) for epoch in range(3)] == [1, 7, 7]
    trainer, model = fit(callback)
    assert model.estimated == trainer.global_step == 9


def test_equals_a_plain_loop():
    _, model = fit(GradientAccumulationScheduler({0: 1, 1: 3}), max_epochs=2)
    plain = Net()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for factor in (1, 3):
        for index, batch in enumerate(loader()):
            if index % factor == 0:
                optimizer.zero_grad()
            (plain.training_step(batch, index) / factor).backward()
            if (index + 1) % factor == 0 or index == 6:
                optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


class Stop(Exception):
    pass


class SaveAndStop(Callback):
    def __init__(self, batches, path):
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batches == self.batches:
            trainer.save_checkpoint(self.path)
            raise Stop


@pytest.mark.parametrize("batches", [3, 6, 7, 9, 12, 14, 17])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, batches):
    """In the middle of an accumulation, at its end, and at the end of an epoch."""
    schedule = {0: 3, 1: 2, 2: 4}
    trainer, whole = fit(GradientAccumulationScheduler(schedule))
    with pytest.raises(Stop):
        fit(GradientAccumulationScheduler(schedule), SaveAndStop(batches, tmp_path / "here.ckpt"))
    again, model = fit(GradientAccumulationScheduler(schedule), ckpt_path=tmp_path / "here.ckpt")
    assert all(map(torch.equal, model.state_dict().values(), whole.state_dict().values()))
    assert again.global_step == trainer.global_step and model.steps == whole.steps[-len(model.steps) :]


@pytest.mark.parametrize(
    ("scheduling", "error", "message"),
    [
        ({}, TypeError, "'scheduling' must be a dict"),
        (4, TypeError, "'scheduling' must be a dict"),
        ({-1: 2}, ConfigurationError, "'an epoch of scheduling' must be an int of at least 0"),
        ({0: 0}, ConfigurationError, r"'scheduling\[0\]' must be an int of at least 1"),
        ({0: 2.0}, ConfigurationError, r"'scheduling\[0\]' must be an int"),
    ],
)
def test_refuses_what_is_no_schedule(scheduling, error, message):
    with pytest.raises(error, match=message):
        GradientAccumulationScheduler(scheduling)


def test_refuses_the_trainers_own():
    with pytest.raises(ConfigurationError, match="must be 1 beside a GradientAccumulationScheduler"):
        fit(GradientAccumulationScheduler({1: 2}), accumulate_grad_batches=2)


def test_refuses_manual_optimization():
    class Manual(Net):
        automatic_optimization = False

    with pytest.raises(ConfigurationError, match=r"needs automatic optimization: Manual\.training_step"):
        fit(GradientAccumulationScheduler({1: 2}), model=Manual())
    fit(GradientAccumulationScheduler({1: 1}), model=Manual())


def test_refuses_a_strategy_with_steps_of_its_own():
    class Engine(SingleDeviceStrategy):
        features = frozenset({"owns_accumulation"})

    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=Engine(), callbacks=GradientAccumulationScheduler({1: 2}), logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="can't be used with strategy 'Engine', which sets its steps up once"):
        trainer.fit(Net(), loader())


def test_refuses_an_optimizer_that_evaluates_again():
    class Searches(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match="evaluates a batch several times"):
        fit(GradientAccumulationScheduler({1: 2}), model=Searches(), max_epochs=1)


def test_what_a_callback_sets_later_goes_before_it():
    def once(trainer, module):
        trainer.accumulate_grad_batches = 7

    trainer, _ = fit(GradientAccumulationScheduler({1: 2}), LambdaCallback(on_train_epoch_start=once))
    assert trainer.global_step == 3
