"""WeightAveraging and EMAWeightAveraging, against torch's AveragedModel in a plain loop."""

import copy
import pickle

import pytest
import torch
from quiet_trainer import make
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from torchhal import Callback, ModelCheckpoint, Module, Trainer
from torchhal.errors import ConfigurationError
from torchhal.strategies import SingleDeviceStrategy
from torchhal.trainer.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.seen = []

    def loss(self, batch):
        return self.body(batch).pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append(state_of(self))

    on_test_batch_start = on_validation_batch_start

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        pass

    def predict_step(self, batch, batch_idx):
        return self.body(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


ROWS = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))


def state_of(module):
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def loader():
    return DataLoader(ROWS, 4, shuffle=True)


def fit(*callbacks, model=None, ckpt_path=None, validate=True, **options):
    model = model or Net()
    trainer = make(*callbacks, **{"max_epochs": 3, **options})
    torch.manual_seed(5)
    trainer.fit(model, loader(), [ROWS] if validate else None, ckpt_path=ckpt_path)
    return trainer, model


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def plain_loop(due, *, epochs=3, at_epoch=False, **options):
    """Return the average at the end of each epoch, and the weights of training."""
    model = Net()
    average = AveragedModel(model, **{"use_buffers": True, **options})
    optimizer = model.configure_optimizers_plainly()
    torch.manual_seed(5)
    step, averages, batches = 0, [], loader()
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
            if due(step):
                average.update_parameters(model)
            step += 1
        if at_epoch:
            average.update_parameters(model)
        averages.append(state_of(average.module))
    return averages, state_of(model)


Net.configure_optimizers_plainly = Net.configure_optimizers


@pytest.mark.parametrize(
    ("callback", "due", "options"),
    [
        (WeightAveraging(), lambda step: True, {}),
        (WeightAveraging(use_buffers=False), lambda step: True, {"use_buffers": False}),
        (WeightAveraging(avg_fn=get_ema_avg_fn(0.8)), lambda step: True, {"avg_fn": get_ema_avg_fn(0.8)}),
        (EMAWeightAveraging(decay=0.9), lambda step: True, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}),
        (
            EMAWeightAveraging(decay=0.9, update_every_n_steps=3, update_starting_at_step=2),
            lambda step: step >= 2 and step % 3 == 0,
            {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        ),
        (
            EMAWeightAveraging(decay=0.9, update_every_n_steps=0, update_starting_at_epoch=0),
            lambda step: False,
            {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "at_epoch": True},
        ),
    ],
    ids=["mean", "buffers of the model", "own function", "ema", "every third step", "by epochs"],
)
def test_equals_a_plain_loop(callback, due, options):
    """Bit for bit: in each validation, and at the end."""
    _, model = fit(callback)
    averages, _ = plain_loop(due, **options)
    late = 1 if options.get("at_epoch") else 0  # a validation comes before the end of its epoch
    for seen, average in zip(model.seen[late:], averages, strict=False):
        assert same(seen, average)
    assert same(state_of(model), averages[-1])


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("callback", [WeightAveraging, EMAWeightAveraging])
def test_counters_are_averaged_on_any_device(callback):
    """A batch norm counts its batches in integers."""
    trainer, model = fit(callback(), max_epochs=1, validate=False)
    assert 0 < int(model.body[1].num_batches_tracked) < 4 == trainer.global_step


def test_training_is_the_same():
    """Averaging changes neither the weights of training nor random numbers."""
    running = []
    look = LambdaCallback(on_train_epoch_end=lambda trainer, module: running.append(state_of(module)))
    fit(EMAWeightAveraging(decay=0.5), look)
    _, plain = fit()
    assert same(running[-1], state_of(plain))


def test_without_an_update_nothing_changes(tmp_path):
    trainer, model = fit(EMAWeightAveraging(update_starting_at_step=1000))
    _, plain = fit()
    assert same(state_of(model), state_of(plain)) and same(model.seen[-1], plain.seen[-1])
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    assert "current_model_state" not in torch.load(tmp_path / "here.ckpt", weights_only=True)


def test_lazy_layers_are_averaged():
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 1))

    _, model = fit(EMAWeightAveraging(decay=0.5), model=Lazy(), validate=False)
    assert model.body[0].weight.shape == (4, 2)


def test_should_update_may_be_overridden():
    class Seldom(WeightAveraging):
        calls = []

        def should_update(self, step_idx=None, epoch_idx=None):
            self.calls.append((step_idx, epoch_idx))
            return step_idx == 3 or epoch_idx == 1

    fit(Seldom(), max_epochs=2, validate=False)
    assert Seldom.calls == [
        *((step, None) for step in range(4)),
        (None, 0),
        *((s, None) for s in range(4, 8)),
        (None, 1),
    ]


def test_evaluations_use_the_average():
    trainer, model = fit(EMAWeightAveraging(decay=0.9), max_epochs=1)
    averages, _ = plain_loop(lambda step: True, epochs=1, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    trainer.test(dataloaders=[ROWS])
    trainer.validate(dataloaders=[ROWS])
    assert len(model.seen) == 3 and all(same(seen, averages[0]) for seen in model.seen)


def test_evaluation_after_an_interrupted_fit():
    def fail(trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            raise KeyError

    model = Net()
    trainer = make(EMAWeightAveraging(decay=0.9), LambdaCallback(on_train_batch_end=fail), max_epochs=1)
    with pytest.raises(KeyError):
        trainer.fit(model, loader())
    running = state_of(model)
    trainer.test(dataloaders=[ROWS])
    assert not same(model.seen[0], running) and same(state_of(model), running)


# -- checkpoints -----------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class SaveAndStop(Callback):
    runs_after_module = True

    def __init__(self, hook, step, path):
        self.step, self.path = step, path
        setattr(self, hook, self.act)

    def act(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise Stop


CALLBACKS = [
    lambda: EMAWeightAveraging(decay=0.9),
    lambda: WeightAveraging(use_buffers=False),
    lambda: EMAWeightAveraging(decay=0.9, update_starting_at_step=5, update_starting_at_epoch=1),
]


@pytest.mark.parametrize("callback", CALLBACKS, ids=["ema", "mean", "late"])
@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("on_train_batch_end", 2), ("on_train_epoch_end", 4), ("on_validation_epoch_start", 8),
        ("on_validation_end", 8), ("on_train_batch_end", 10), ("on_train_end", 12),
    ],
)  # fmt: skip
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, callback, hook, step):
    path = tmp_path / "here.ckpt"
    _, whole = fit(callback(), max_epochs=4)
    with pytest.raises(Stop):
        fit(callback(), SaveAndStop(hook, step, path), max_epochs=3 if hook == "on_train_end" else 4)
    _, again = fit(callback(), ckpt_path=path, max_epochs=4)
    assert same(state_of(whole), state_of(again))
    assert all(same(one, other) for one, other in zip(whole.seen[-len(again.seen) :], again.seen, strict=True))


def test_a_checkpoint_holds_the_average(tmp_path):
    callback = ModelCheckpoint(tmp_path, save_top_k=-1)
    trainer, model = fit(EMAWeightAveraging(decay=0.9), callback)
    averages, running = plain_loop(lambda step: True, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for path, average in zip(sorted(tmp_path.glob("*.ckpt")), averages, strict=True):
        saved = torch.load(path, weights_only=True)
        assert same(saved["state_dict"], average)
    assert same(saved["current_model_state"], running)
    assert saved["averaging_state"] == {"n_averaged": 12}
    assert same(state_of(Net.load_from_checkpoint(tmp_path / "epoch=2-step=12.ckpt")), averages[-1])
    trainer.test(ckpt_path=str(tmp_path / "epoch=0-step=4.ckpt"), dataloaders=[ROWS])
    assert same(model.seen[-1], averages[0])
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "current_model_state" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


@pytest.mark.parametrize("through_file", [False, True])
def test_second_fit_goes_on(tmp_path, through_file):
    """With the weights of training, though the first one left the average in the model."""
    _, whole = fit(EMAWeightAveraging(decay=0.9), max_epochs=3, validate=False)
    trainer, model = fit(EMAWeightAveraging(decay=0.9), max_epochs=2, validate=False)
    if through_file:
        trainer.save_checkpoint(tmp_path / "here.ckpt")
        _, model = fit(EMAWeightAveraging(decay=0.9), max_epochs=3, validate=False, ckpt_path=tmp_path / "here.ckpt")
        assert same(state_of(model), state_of(whole))
    else:
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, loader())
        assert trainer.callbacks[0]._average.n_averaged == 12
        assert not trainer.callbacks[0]._evaluating and trainer.callbacks[0]._in_use


def test_fit_of_another_model():
    trainer, _ = fit(EMAWeightAveraging(decay=0.9), max_epochs=1)
    other = Net()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(other, loader())
    assert trainer.callbacks[0]._average.n_averaged == 4


def test_exception_in_a_validation_saves_both(tmp_path):
    def fail(trainer, *args):
        if trainer.global_step == 8:
            raise KeyError

    model = Net()
    with pytest.raises(KeyError):
        fit(
            EMAWeightAveraging(decay=0.9), OnExceptionCheckpoint(tmp_path),
            LambdaCallback(on_validation_batch_end=fail), model=model,
        )  # fmt: skip
    averages, running = plain_loop(lambda step: True, epochs=2, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert same(saved["state_dict"], averages[-1]) and same(saved["current_model_state"], running)
    assert same(state_of(model), running)


def test_a_checkpoint_without_an_average(tmp_path):
    trainer, _ = fit(max_epochs=1)
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    again, _ = fit(EMAWeightAveraging(decay=0.9), max_epochs=2, ckpt_path=tmp_path / "here.ckpt")
    assert again.callbacks[0]._average.n_averaged == 4


def test_a_checkpoint_with_an_average_and_no_callback(tmp_path):
    trainer, _ = fit(EMAWeightAveraging(decay=0.9), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    with pytest.warns(UserWarning, match="which only a WeightAveraging callback continues from"):
        fit(max_epochs=2, ckpt_path=tmp_path / "here.ckpt")


def test_tied_weights_are_saved_by_each_name(tmp_path):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.body[1].weight = self.body[0].weight

    trainer, model = fit(EMAWeightAveraging(decay=0.5), model=Tied(), validate=False)
    trainer.save_checkpoint(tmp_path / "here.ckpt")
    saved = torch.load(tmp_path / "here.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["body.0.weight"], saved["state_dict"]["body.1.weight"])
    assert torch.equal(saved["state_dict"]["body.0.weight"], model.body[0].weight)


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "arguments", "error", "message"),
    [
        (WeightAveraging, {"use_buffers": 1}, ConfigurationError, "'use_buffers' must be a bool"),
        (WeightAveraging, {"avg_fn": 1}, TypeError, "'avg_fn' must be a function or None"),
        (WeightAveraging, {"avg_fn": max, "multi_avg_fn": max}, ConfigurationError, "must not both be given"),
        (EMAWeightAveraging, {"decay": 1.5}, ValueError, "'decay' must be from 0 to 1"),
        (EMAWeightAveraging, {"decay": "a"}, TypeError, "'decay' must be a number"),
        (EMAWeightAveraging, {"update_every_n_steps": -1}, ConfigurationError, "'update_every_n_steps' must be an int"),
    ],
)
def test_refuses(cls, arguments, error, message):
    with pytest.raises(error, match=message):
        cls(**arguments)


@pytest.mark.parametrize("order", [1, -1])
def test_refuses_another_average_of_the_model(order):
    callbacks = [EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)][::order]
    with pytest.raises(ConfigurationError, match="StochasticWeightAveraging beside EMAWeightAveraging"):
        fit(*callbacks)


def test_refuses_two():
    with pytest.raises(ConfigurationError, match="must not hold two WeightAveragings"):
        fit(EMAWeightAveraging(), WeightAveraging())


def test_refuses_an_engine_with_weights_of_its_own():
    class Engine(SingleDeviceStrategy):
        features = frozenset({"owns_optimizer_state"})

    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=Engine(), callbacks=EMAWeightAveraging(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="EMAWeightAveraging can't be used with strategy 'Engine'"):
        trainer.fit(Net(), loader())


def test_pickles():
    trainer, _ = fit(EMAWeightAveraging(decay=0.9), max_epochs=1)
    again = pickle.loads(pickle.dumps(trainer.callbacks[0]))
    assert again.decay == 0.9 and again._average is None
    assert copy.deepcopy(trainer.callbacks[0])._latest_update_step == 4


# -- ranks -----------------------------------------------------------------------------------------------------------


def average_in_ranks(folder):
    path, options = f"{folder}/here.ckpt", {"devices": 2, "strategy": "ddp"}

    def save(trainer, module, *args):
        if trainer.global_step == 3:
            trainer.save_checkpoint(path)

    found = []
    for callbacks, ckpt_path in (([LambdaCallback(on_train_batch_end=save)], None), ([], path)):
        model = Net()
        fit(EMAWeightAveraging(decay=0.9), *callbacks, model=model, ckpt_path=ckpt_path, **options)
        found.append((state_of(model), model.seen))
    return found


@pytest.mark.slow_on_sim
@pytest.mark.usefixtures("accelerator")
def test_ranks(world2, tmp_path):
    """All ranks train and average alike, but for the statistics of their own batches; rank 0's are continued."""
    (first, again), (other, _) = world2.run(average_in_ranks, str(tmp_path))
    assert all(torch.equal(first[0][name], other[0][name]) for name, _ in Net().named_parameters())
    assert same(first[0], again[0])
    assert all(same(one, two) for one, two in zip(first[1][1:], again[1], strict=True))


@pytest.mark.parametrize("make_callback", [lambda: EMAWeightAveraging(decay=0.5), WeightAveraging], ids=["ema", "mean"])
def test_a_finished_run_that_is_continued_has_the_average(tmp_path, make_callback):
    def run():
        saver = ModelCheckpoint(tmp_path, save_last=True)
        return fit(make_callback(), saver, ckpt_path="last", enable_checkpointing=True)

    _, first = run()
    trainer, again = run()
    assert trainer.global_step == 12 and same(state_of(first), state_of(again))
    trainer.fit(again, loader(), ckpt_path=None)  # nothing to do, once more
    assert same(state_of(first), state_of(again))


def test_never_averaging_is_refused():
    with pytest.raises(ConfigurationError, match="else nothing is ever averaged"):
        EMAWeightAveraging(update_every_n_steps=0)
    for device in (0.9, "nope", True):
        with pytest.raises(ConfigurationError, match=r"'device' must be a torch\.device, a string"):
            EMAWeightAveraging(device)
