"""The Tuner, and the finders among Lightning's callbacks, find what Lightning's own find."""

from importlib import import_module

import pytest
import torch
from lightning_models import dataset
from torch import nn
from torch.utils.data import DataLoader

import torchhal
from torchhal.errors import ConfigurationError
from torchhal.tuning import find_batch_size, find_learning_rate
from torchhal_lightning import Trainer, Tuner

QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "max_epochs": 2,
}  # fmt: skip


def tuned(pl, *, own_loader=True):
    """Return a model with a learning rate and a batch size, and a data module with one, too."""

    class Net(pl.LightningModule):
        def __init__(self, lr=1e-3, batch_size=4):
            super().__init__()
            self.save_hyperparameters()
            self.body = nn.Linear(6, 3)
            self.losses = []

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val", self.body(batch[0]).mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

        def loader(self):
            return DataLoader(dataset(400), self.hparams.batch_size, shuffle=True)

        if own_loader:
            train_dataloader = val_dataloader = loader

    torch.manual_seed(0)
    return Net()


def tuner_of(pl, kind, **options):
    if kind == "ours":
        return Tuner(Trainer(**{**QUIET, **options}))
    return import_module(f"{pl.__name__}.tuner").Tuner(pl.Trainer(**{**QUIET, **options}))


@pytest.mark.parametrize("mode", ["exponential", "linear"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_learning_rate(pl, mode, accumulate):
    found = []
    for kind in ("theirs", "ours"):
        module = tuned(pl)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        torch.manual_seed(3)
        tuner = tuner_of(pl, kind, accumulate_grad_batches=accumulate)
        rates = tuner.lr_find(module, num_training=40, mode=mode)
        assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
        losses = [loss * (accumulate if kind == "theirs" else 1) for loss in rates.results["loss"]]
        found.append((rates.results["lr"], losses, rates.suggestion(), module.hparams.lr, module.losses))
    assert found[0] == found[1] and found[1][3] == found[1][2] != 1e-3


def test_the_model_has_its_trainer_again(pl):
    tuner, module = tuner_of(pl, "ours", max_steps=3), tuned(pl)
    tuner.lr_find(module, num_training=5, update_attr=False)
    assert module.trainer is tuner._trainer


def test_a_search_ends_where_the_loss_grows(pl):
    found = []
    for kind in ("theirs", "ours"):
        torch.manual_seed(3)
        rates = tuner_of(pl, kind).lr_find(tuned(pl), max_lr=1e4, num_training=90, update_attr=False)
        found.append(rates.results)
    assert found[0] == found[1] and len(found[1]["lr"]) < 90


@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize("method", ["fit", "validate"])
def test_a_batch_size(pl, mode, method):
    found = []
    for kind in ("theirs", "ours"):
        module = tuned(pl)
        size = tuner_of(pl, kind).scale_batch_size(module, mode=mode, max_trials=4, method=method)
        found.append((size, module.hparams.batch_size))
    assert found[0] == found[1]


def test_memory_runs_out(pl):
    """Sizes up to 100 fit: doubling finds 64, and the halving after it the largest."""
    limit = 100

    def step(self, batch, batch_idx):
        if len(batch[0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.body(batch[0]).sum()

    for mode, expected in (("power", 64), ("binsearch", limit)):
        module = tuned(pl)
        type(module).training_step = step
        assert tuner_of(pl, "ours").scale_batch_size(module, mode=mode, margin=0.0) == expected
    module = tuned(pl)
    limit = 0
    type(module).training_step = step
    with pytest.raises(ConfigurationError, match="not even the smallest batch size"):
        tuner_of(pl, "ours").scale_batch_size(module)


def test_another_error_is_the_models(pl):
    module = tuned(pl)
    type(module).training_step = lambda self, batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        tuner_of(pl, "ours").scale_batch_size(module)


def test_the_callbacks(pl):
    """They find the same; here the run goes on with the data in the order that it has without them."""
    found = []
    for trainer_of in (pl.Trainer, torchhal.Trainer, Trainer):
        module, finder = tuned(pl), pl.callbacks.LearningRateFinder(num_training_steps=30)
        torch.manual_seed(3)
        trainer_of(**QUIET, callbacks=[finder]).fit(module)
        lrs = (finder.optimal_lr.results, finder.optimal_lr.suggestion(), module.hparams.lr)
        sizes, scaler = tuned(pl), pl.callbacks.BatchSizeFinder(max_trials=3)
        trainer = trainer_of(**QUIET, callbacks=[scaler])
        trainer.fit(sizes)
        size = (scaler.optimal_batch_size, sizes.hparams.batch_size, trainer.global_step)
        assert "lr_find" not in vars(finder) and "setup" not in vars(scaler)
        found.append((lrs, size))
    assert found[0] == found[1] == found[2]
    with_finder, without = tuned(pl), tuned(pl)
    for module, callbacks in (
        (with_finder, [pl.callbacks.LearningRateFinder(num_training_steps=30, update_attr=False)]),
        (without, []),
    ):
        torch.manual_seed(3)
        torchhal.Trainer(**QUIET, callbacks=callbacks).fit(module)
    assert with_finder.losses == without.losses


def test_a_finder_at_epochs_of_ones_own(pl):
    class AtMilestones(pl.callbacks.LearningRateFinder):
        lrs = ()

        def on_fit_start(self, trainer, module): ...

        def on_train_epoch_start(self, trainer, module):
            self.lr_find(trainer, module)
            self.lrs += (trainer.optimizers[0].param_groups[0]["lr"],)

    module, finder = tuned(pl), AtMilestones(num_training_steps=20)
    torchhal.Trainer(**QUIET, callbacks=[finder]).fit(module)
    assert len(finder.lrs) == 2 and finder.lrs[-1] == module.hparams.lr == finder.optimal_lr.suggestion()


def test_what_is_refused(pl):
    loader = DataLoader(dataset(), 4)
    for arguments, kind, why in (
        ({"method": "test"}, ConfigurationError, "'method' must be 'fit' for a range test"),
        ({"dataloaders": loader}, ConfigurationError, "'dataloaders' must be None"),
        ({"attr_name": "rate"}, AttributeError, "no 'rate' in the model"),
    ):
        with pytest.raises(kind, match=why):
            tuner_of(pl, "ours").lr_find(tuned(pl), **arguments)
    for arguments, kind, why in (
        ({"method": "fly"}, ValueError, "'method' must be one of 'fit'"),
        ({"train_dataloaders": loader}, ConfigurationError, "loaders that are passed can't be changed"),
        ({"batch_arg_name": "size"}, ConfigurationError, "no field 'size'"),
        ({"mode": "guess"}, ValueError, "'mode' must be 'power' or 'binsearch'"),
    ):
        with pytest.raises(kind, match=why):
            tuner_of(pl, "ours").scale_batch_size(tuned(pl), **arguments)
    with pytest.raises(ConfigurationError, match="loaders that are passed"):
        torchhal.Trainer(**QUIET, callbacks=[pl.callbacks.BatchSizeFinder()]).fit(tuned(pl), loader)


def test_two_optimizers(pl):
    module = tuned(pl)
    type(module).automatic_optimization = False
    first, second = (torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    type(module).configure_optimizers = lambda self: ([first, second], [])
    with pytest.raises(ConfigurationError, match=r"one optimizer for a range test \(got 2\)"):
        tuner_of(pl, "ours").lr_find(module)


def test_torchhals_own_functions(pl):
    """They take LightningModules, and the Trainer below this one's; a trial's module has the trial for its Trainer."""
    steps = []
    module, trainer = tuned(pl), Trainer(**QUIET)
    type(module).on_train_batch_end = lambda self, outputs, batch, batch_idx: steps.append(self.trainer.global_step)
    rates = find_learning_rate(trainer.trainer, module, num_steps=12)
    assert len(rates.lr) == 12 and steps == [*range(1, 13)]
    assert find_batch_size(trainer.trainer, module, max_size=16) == 16
    assert module.losses == [] and module.hparams.batch_size == 4 and trainer.global_step == 0
