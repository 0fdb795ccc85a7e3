"""StochasticWeightAveraging, against torch's AveragedModel, SWALR and a pass for batch norms in a plain loop."""

import copy
import pickle

import pytest
import torch
from quiet_trainer import make
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from torchhal import Callback, ModelCheckpoint, Module, Trainer
from torchhal.errors import CheckpointMismatchError, ConfigurationError
from torchhal.strategies import SingleDeviceStrategy
from torchhal.trainer._checkpoint_digests import KEY
from torchhal.trainer.callbacks import StochasticWeightAveraging


class Net(Module):
    def __init__(self, norm=True, scheduler=None):
        super().__init__()
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(8, momentum=0.3)] if norm else []
        self.body = nn.Sequential(nn.Linear(2, 8), *norms, nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.scheduler = scheduler
        self.rates = []

    def loss(self, batch):
        return self.body(batch).pow(2).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def make_optimizer(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self):
        optimizer = self.make_optimizer()
        if self.scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.9), "interval": self.scheduler}]


ROWS = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))


def loader():
    return DataLoader(ROWS, 4, shuffle=True)


def fit(*callbacks, model=None, data=None, ckpt_path=None, **options):
    model = model or Net()
    trainer = make(*callbacks, **{"max_epochs": 6, **options})
    torch.manual_seed(5)
    trainer.fit(model, loader() if data is None else data, ckpt_path=ckpt_path)
    return trainer, model


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def plain_loop(model, *, start, lr=0.05, anneal=2, strategy="cos", epochs=6, avg_fn=None):
    average = AveragedModel(model, avg_fn=avg_fn)
    optimizer = model.make_optimizer()
    scheduler = StepLR(optimizer, 1, 0.9) if model.scheduler else None
    torch.manual_seed(5)
    batches = loader()
    for epoch in range(epochs):
        if epoch == start:
            swalr = scheduler = SWALR(optimizer, lr, anneal_epochs=anneal, anneal_strategy=strategy)
        if epoch >= start:
            average.update_parameters(model)
        for batch in batches:
            optimizer.zero_grad()
            model.loss(batch).backward()
            model.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if model.scheduler == "step" and epoch < start:
                scheduler.step()
        if epoch >= start or model.scheduler == "epoch":
            scheduler.step()
    assert epochs <= start or scheduler is swalr
    with torch.no_grad():
        for averaged, parameter in zip(average.module.parameters(), model.parameters(), strict=True):
            parameter.copy_(averaged)
        norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm1d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        if norms:
            for batch in batches:
                model.loss(batch)
    return model


@pytest.mark.parametrize("scheduler", [None, "epoch", "step"])
@pytest.mark.parametrize("norm", [True, False], ids=["batch norm", "none"])
def test_equals_a_plain_loop(norm, scheduler):
    """Bit for bit: rates, parameters and statistics."""
    callback = StochasticWeightAveraging(0.05, swa_epoch_start=0.7, annealing_epochs=2)
    _, model = fit(callback, model=Net(norm, scheduler))
    plain = plain_loop(Net(norm, scheduler), start=3)  # int(0.7 * 6) - 1
    assert same(model, plain) and model.rates == plain.rates
    assert all(each.momentum == 0.3 for each in model.modules() if isinstance(each, nn.BatchNorm1d))


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"swa_epoch_start": 1}, {"start": 0, "anneal": 10}),
        ({"swa_epoch_start": 4, "annealing_epochs": 0}, {"start": 3, "anneal": 0}),
        (
            {"swa_epoch_start": 3, "annealing_strategy": "linear", "device": None},
            {"start": 2, "anneal": 10, "strategy": "linear"},
        ),
        (
            {"swa_epoch_start": 3, "avg_fn": lambda average, new, count: 0.5 * average + 0.5 * new},
            {"start": 2, "anneal": 10, "avg_fn": lambda average, new, count: 0.5 * average + 0.5 * new},
        ),
        ({"swa_epoch_start": 1.0}, {"start": 5, "anneal": 10}),
        ({"swa_epoch_start": 0.0}, {"start": 0, "anneal": 10}),
        ({"swa_epoch_start": 5, "swa_lrs": [0.02]}, {"start": 4, "anneal": 10, "lr": 0.02}),
    ],
)
def test_arguments(options, plain):
    _, model = fit(StochasticWeightAveraging(**{"swa_lrs": 0.05, **options}))
    expected = plain_loop(Net(), **plain)
    assert same(model, expected) and model.rates == expected.rates


def test_ends_before_it_begins():
    _, model = fit(StochasticWeightAveraging(0.05, swa_epoch_start=9))
    _, plain = fit()
    assert same(model, plain)


def test_pass_for_batch_norms_logs_nothing():
    trainer, _ = fit(StochasticWeightAveraging(0.05, swa_epoch_start=2))
    without, _ = fit(StochasticWeightAveraging(0.05, swa_epoch_start=2), model=Net(norm=False))
    assert trainer.callback_metrics.keys() == without.callback_metrics.keys() == {"loss", "loss_step", "loss_epoch"}
    assert trainer.callback_metrics["loss"] == trainer.callback_metrics["loss_epoch"]
    assert (trainer.global_step, trainer.current_epoch) == (24, 6) and "log" not in vars(trainer.results)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize("data", [[ROWS[:8], ROWS[8:]], DataLoader(Stream(), 4)], ids=["list", "stream"])
def test_any_loader(data):
    _, model = fit(StochasticWeightAveraging(0.05, swa_epoch_start=5), data=data, limit_train_batches=2)
    assert int(model.body[1].num_batches_tracked) == 2


# -- resume ----------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class SaveAndStop(Callback):
    def __init__(self, hook, step, path):
        self.step, self.path = step, path
        setattr(self, hook, self.act)

    def act(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise Stop


@pytest.mark.parametrize("scheduler", [None, "epoch", "step"])
@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("on_train_batch_end", 6), ("on_train_epoch_end", 8), ("on_train_batch_end", 9), ("on_train_batch_end", 14),
        ("on_train_epoch_end", 20),
    ],
)  # fmt: skip
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, scheduler, hook, step):
    path = tmp_path / "here.ckpt"

    def callback():
        return StochasticWeightAveraging(0.05, swa_epoch_start=3, annealing_epochs=3)

    _, whole = fit(callback(), model=Net(scheduler=scheduler))
    with pytest.raises(Stop):
        fit(callback(), SaveAndStop(hook, step, path), model=Net(scheduler=scheduler))
    _, again = fit(callback(), model=Net(scheduler=scheduler), ckpt_path=path)
    assert same(whole, again) and again.rates == whole.rates[-len(again.rates) :]


def test_refuses_the_average_of_another_model(tmp_path):
    path = tmp_path / "here.ckpt"
    with pytest.raises(Stop):
        fit(StochasticWeightAveraging(0.05, 1), SaveAndStop("on_train_epoch_end", 8, path))
    saved = torch.load(path, weights_only=True)
    del saved["callbacks"]["StochasticWeightAveraging"]["average_model_state"]["body.0.bias"]
    del saved[KEY]
    torch.save(saved, path)
    with pytest.raises(CheckpointMismatchError, match=r"has no parameter 'body\.0\.bias'"):
        fit(StochasticWeightAveraging(0.05, 1), ckpt_path=path)


def test_another_trainer_begins_anew():
    callback = StochasticWeightAveraging(0.05, 2, annealing_epochs=2)
    fit(callback)
    _, model = fit(callback)
    assert same(model, plain_loop(Net(), start=1))


def test_pickles():
    callback = StochasticWeightAveraging(0.05, 2)
    fit(callback)
    again = pickle.loads(pickle.dumps(callback))
    assert again._n_averaged == 5 and again._parameters.keys() == dict(Net().named_parameters()).keys()
    assert copy.deepcopy(callback)._latest_update_epoch == 5
    assert again.state_dict()["has_scheduler"] is True


def test_returns_the_state_that_it_has_loaded():
    callback, other = StochasticWeightAveraging(0.05, 2), StochasticWeightAveraging(0.05, 2)
    fit(callback)
    other.load_state_dict(callback.state_dict())
    assert other.state_dict().keys() == callback.state_dict().keys()
    assert other.state_dict()["has_scheduler"] is callback.state_dict()["has_scheduler"] is True


def test_a_state_that_lies():
    callback = StochasticWeightAveraging(0.05, 2)
    fit(callback)
    before = callback.state_dict()
    for name, value in (("has_scheduler", "no"), ("n_averaged", -1), ("latest_update_epoch", 0.5)):
        with pytest.raises(ConfigurationError, match=f"'{name}' must be"):
            callback.load_state_dict({**before, name: value})
    assert callback.state_dict()["n_averaged"] == before["n_averaged"]


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"swa_lrs": -0.1}, ValueError, "'swa_lrs' must be a positive finite number"),
        ({"swa_lrs": []}, ValueError, "'swa_lrs' must be a positive finite number"),
        ({"swa_lrs": "a"}, TypeError, "'swa_lrs' must be a number"),
        ({"swa_epoch_start": 1.5}, ValueError, "'swa_epoch_start' must be an epoch or a share from 0.0 to 1.0"),
        ({"swa_epoch_start": 0}, ConfigurationError, "'swa_epoch_start' must be an int of at least 1"),
        ({"annealing_epochs": -1}, ConfigurationError, "'annealing_epochs' must be an int"),
        ({"annealing_strategy": "sine"}, ValueError, "'annealing_strategy' must be 'cos' or 'linear'"),
        ({"avg_fn": 3}, TypeError, "'avg_fn' must be a function"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, **arguments})


class Several(Net):
    def configure_optimizers(self):
        return [self.make_optimizer(), self.make_optimizer()]


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = self.make_optimizer()
        return [optimizer], [StepLR(optimizer, 1), StepLR(optimizer, 2)]


class Manual(Net):
    automatic_optimization = False


class Nothing(Net):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Several, r"works with one optimizer \(the model has 2\)"),
        (Scheduled, r"works with one scheduler \(the model has 2\)"),
        (Manual, "needs automatic optimization: Manual.training_step steps the optimizers itself"),
        (Nothing, "needs an optimizer, and the model has none"),
    ],
)
def test_refuses_a_model(model, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(StochasticWeightAveraging(0.05), model=model())


def test_refuses_a_share_of_no_limit():
    with pytest.raises(ConfigurationError, match="'swa_epoch_start' must be an epoch where max_epochs=-1"):
        fit(StochasticWeightAveraging(0.05), max_epochs=-1, max_steps=4)


def test_refuses_other_numbers_of_rates():
    with pytest.raises(ConfigurationError, match=r"'swa_lrs' must hold a rate for each of the 1 parameter group\(s\)"):
        fit(StochasticWeightAveraging([0.1, 0.2], 1))


def test_refuses_an_engine_with_optimizers_of_its_own():
    class Engine(SingleDeviceStrategy):
        features = frozenset({"owns_schedulers"})

    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=Engine(), callbacks=StochasticWeightAveraging(0.1), logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="can't be used with strategy 'Engine'"):
        trainer.fit(Net(), loader())


# -- ranks -----------------------------------------------------------------------------------------------------------


def average_in_ranks(folder):
    path, options = f"{folder}/here.ckpt", {"devices": 2, "strategy": "ddp"}

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 7:
                trainer.save_checkpoint(path)

    found = []
    for callbacks, ckpt_path in (([Save()], None), ([], path)):
        _, model = fit(StochasticWeightAveraging(0.05, 3), *callbacks, ckpt_path=ckpt_path, **options)
        found.append({name: value.detach().cpu().clone() for name, value in model.named_parameters()})
        found[-1]["batches"] = model.body[1].num_batches_tracked.cpu().clone()
    return found


@pytest.mark.slow_on_sim
@pytest.mark.usefixtures("accelerator")
def test_ranks(world2, tmp_path):
    """All ranks have the same average, and continue it exactly."""
    (whole, again), (other, _) = world2.run(average_in_ranks, str(tmp_path))
    assert all(torch.equal(whole[name], other[name]) and torch.equal(whole[name], again[name]) for name in whole)
    assert whole["batches"] == 2


@pytest.mark.parametrize("norm", [False, True])
def test_a_finished_run_that_is_continued_has_the_average(tmp_path, norm):
    def run():
        callback = StochasticWeightAveraging(0.05, 2)
        saver = ModelCheckpoint(tmp_path, save_last=True)
        return fit(callback, saver, model=Net(norm), ckpt_path="last", enable_checkpointing=True)

    (_, first), (_, again) = run(), run()
    for name, value in first.named_parameters():
        assert torch.equal(value, again.get_parameter(name)), name


def test_never_averaging_is_said():
    with pytest.warns(UserWarning, match="averages nothing: it begins in epoch 50, and max_epochs=3"):
        fit(StochasticWeightAveraging(0.05, 50), max_epochs=3)
    with pytest.raises(ValueError, match="'swa_lrs' must be a positive finite number"):
        StochasticWeightAveraging(float("inf"))


def test_a_batch_norm_in_evaluation_mode_keeps_its_statistics():
    class Frozen(Net):
        def on_train_epoch_start(self):
            self.body[1].eval()

    model = Frozen()
    model.body[1].running_mean.fill_(3.0)
    fit(StochasticWeightAveraging(0.05, 2), model=model)
    assert torch.equal(model.body[1].running_mean, torch.full((8,), 3.0))


def test_another_model_has_an_average_of_its_own():
    callback = StochasticWeightAveraging(0.05, 2)
    trainer, _ = fit(callback)
    other = Net()
    before = copy.deepcopy(other.state_dict())
    trainer.fit(other, loader())  # nothing to do
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_the_pass_for_batch_norms_leaves_the_place_in_the_data():
    places = []
    for norm in (False, True):
        trainer, _ = fit(StochasticWeightAveraging(0.05, 1), model=Net(norm), max_steps=6)
        places.append(trainer.fit_loop.progress.data.position()["generators"])
    assert str(places[0]) == str(places[1])
