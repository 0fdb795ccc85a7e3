"""Test the accepted and refused returns of configure_optimizers, and when schedulers step."""

import copy

import pytest
import torch
from full_net import Net, batches, fit
from quiet_trainer import make
from torch import nn

from torchhal import Callback
from torchhal.errors import (
    ConfigurationError,
    ModelError,
)

pytestmark = pytest.mark.usefixtures("accelerator")


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


def test_monitored_scheduler():
    """A monitored scheduler gets the validation metric of its epoch."""

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


def test_training_length_in_configure_optimizers():
    """configure_optimizers can read the number of batches and steps."""

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


def test_an_optimizer_step_that_forgets_its_closure():
    """The model would not be trained, and nobody would notice."""

    class Forgets(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure): ...

    with pytest.raises(
        ModelError, match=r"Forgets\.optimizer_step has not used the batch: call optimizer\.step\(closure\)"
    ):
        fit(Forgets())

    class Skips(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()

    model = Skips()
    before = [parameter.clone() for parameter in model.parameters()]
    fit(model)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_closure_has_gradients_on_inside_of_a_step_without():
    """Optimizers of other libraries decorate their step with no_grad, and call the closure in it."""

    class Decorated(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            loss = closure()
            super().step()
            return loss

    models = []
    for optimizer in (torch.optim.SGD, Decorated):

        class Stepped(Net):
            def configure_optimizers(self, optimizer=optimizer):
                return optimizer(self.parameters(), lr=0.1)

        torch.manual_seed(0)
        models.append(Stepped())
        fit(models[-1])
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
