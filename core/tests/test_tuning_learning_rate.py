"""find_learning_rate against a plain loop, and what it leaves behind: nothing."""

import copy
import json
import math
import signal
import sys

import pytest
import torch
from quiet_trainer import make
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from torchhal import Callback, DataModule, ModelCheckpoint, Module
from torchhal.errors import ConfigurationError, ModelError
from torchhal.trainer.loggers import CSVLogger
from torchhal.tuning import LearningRates, RangeTest, find_learning_rate

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Net(Module):
    def __init__(self, on_step=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.on_step = on_step
        self.steps = 0
        self.lrs = []

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.lrs.append([group["lr"] for group in self.optimizers().param_groups])
        if self.on_step is not None:
            self.on_step(self)
        x, y = batch
        return mse_loss(self.body(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Plain(Net):
    """Without random numbers and statistics."""

    def __init__(self, on_step=None):
        super().__init__(on_step)
        self.body = nn.Linear(4, 1)


def loader(**options):
    return DataLoader(DATA, **{"batch_size": 8, **options})


def state_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def losses_of_a_plain_loop(lrs, batches):
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        x, y = batches[step % len(batches)]
        loss = mse_loss(model.body(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_losses_equal_a_plain_loop(mode, accelerator):
    rates = find_learning_rate(make(), Plain(), loader(), min_lr=1e-4, max_lr=0.1, num_steps=30, mode=mode)
    step = (0.1 / 1e-4) ** (1 / 29) if mode == "exponential" else (0.1 - 1e-4) / 29
    expected = [1e-4 * step**i if mode == "exponential" else 1e-4 + step * i for i in range(30)]
    assert rates.lr == pytest.approx(expected) and rates.lr[0] == 1e-4 and not rates.diverged
    assert rates.loss == pytest.approx(losses_of_a_plain_loop(rates.lr, list(loader())), rel=1e-4)
    average = 0.0
    for count, (loss, smoothed) in enumerate(zip(rates.loss, rates.smoothed, strict=True), 1):
        average = 0.98 * average + 0.02 * loss
        assert smoothed == pytest.approx(average / (1 - 0.98**count))


def test_suggestion_is_where_the_loss_falls_most_steeply():
    rates = LearningRates("exponential", 1e-5, 1.0, 51)
    for step in range(51):  # a slope in the middle, on a logarithmic axis
        loss = 1 / (1 + math.exp((step - 30) / 2))
        rates.add(loss, loss)
    assert rates.suggestion() == rates.lr[30] == pytest.approx(1e-5 * 1e5 ** (30 / 50))


def test_suggestion_among_noise():
    """A loss that falls by 9 between steps 50 and 60, with the noise of batches, and diverges in the end."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rates = LearningRates("exponential", 1e-5, 1.0, 100)
        for step in range(100):
            fall = 9 * min(max((60 - step) / 10, 0), 1)
            noise = fall * 0.25 * torch.randn(1, generator=generator).item()
            loss = 1 + fall + noise + (step - 90 if step > 90 else 0) ** 2
            rates.add(loss, loss)
        assert rates.lr[48] < rates.suggestion() < rates.lr[62]


def test_too_few_losses_for_a_suggestion(caplog):
    rates = LearningRates("exponential", 1e-5, 1.0, 4)
    for loss in (3.0, math.nan, math.inf, 1.0):
        rates.add(loss, loss)
    assert rates.suggestion() is None and "from 2 loss(es)" in caplog.text


def test_a_loss_that_is_never_finite(caplog):
    rates = LearningRates("linear", 0.0, 1.0, 20)
    rates.add(math.nan, math.nan)
    assert rates.suggestion() is None and "not finite from the first step on" in caplog.text


def test_no_suggestion_where_the_loss_does_not_fall(caplog):
    rates = LearningRates("linear", 0.0, 1.0, 20)
    for step in range(20):
        rates.add(step, step)
    assert rates.suggestion() is None and "does not fall" in caplog.text


def test_a_diverging_loss_ends_the_test():
    options = {"max_lr": 1e5, "num_steps": 60, "smoothing": 0.5}
    rates = find_learning_rate(make(), Plain(), loader(), **options)
    assert rates.diverged and len(rates.lr) < 60
    assert rates.smoothed[-1] > 4 * min(rates.smoothed) or not math.isfinite(rates.smoothed[-1])
    assert rates.suggestion() < rates.lr[-1]
    rates = find_learning_rate(make(), Plain(), loader(), **options, stop_factor=None)
    assert len(rates.lr) == 60 and not rates.diverged


class Lowered(Plain):
    """Plain, with a loss of another zero."""

    offset = 0.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.offset


@pytest.mark.parametrize("offset", [-10.0, -1000.0])
def test_a_diverging_loss_below_zero_ends_the_test(offset):
    model = Lowered()
    model.offset = offset
    options = {"max_lr": 1e5, "num_steps": 60, "smoothing": 0.5}
    rates = find_learning_rate(make(), model, loader(), **options)
    assert rates.diverged and len(rates.lr) < 60 and min(rates.smoothed) < 0
    rates = find_learning_rate(make(), model, loader(), **options, stop_factor=None)
    assert len(rates.lr) == 60 and not rates.diverged


@pytest.mark.parametrize(
    ("first", "minimum", "smoothed", "ends"),
    [
        (5.0, 1.0, 3.9, False), (5.0, 1.0, 4.1, True), (-10.0, -10.0, 19.0, False), (-10.0, -10.0, 21.0, True),
        (5.0, -0.1, 15.1, False), (5.0, -0.1, 15.3, True), (5.0, 0.0, 14.9, False), (5.0, 0.0, 15.1, True),
        (-1.0, -1.0, math.nan, True), (-1.0, -1.0, math.inf, True), (math.nan, math.inf, 5.0, False),
    ],
)  # fmt: skip
def test_divergence_is_a_rise_from_the_minimum(first, minimum, smoothed, ends):
    test = RangeTest(LearningRates("linear", 0.0, 1.0, 10), stop_factor=4.0)
    test.first, test.minimum = first, minimum
    assert test.diverges(smoothed) is ends


@pytest.mark.parametrize("length", [12, None])
def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches(length):
    """12 batches, so that with 5 per step the third of each epoch has two."""
    losses = []

    class Recording(Plain):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    class WithoutLength(IterableDataset):
        def __iter__(self):
            return iter(DATA)

    data = loader() if length else DataLoader(WithoutLength(), 8)
    rates = find_learning_rate(make(accumulate_grad_batches=5), Recording(), data, num_steps=6)
    steps = [losses[start:end] for start, end in [(0, 5), (5, 10), (10, 12), (12, 17), (17, 22), (22, 24)]]
    assert rates.loss == pytest.approx([sum(each) / len(each) for each in steps])
    assert len(losses) == 24 and len(rates.lr) == 6


def test_one_learning_rate_per_optimizer_step():
    model = Plain(lambda self: seen.append(self.lrs[-1][0]))
    seen = []
    rates = find_learning_rate(make(accumulate_grad_batches=3), model, loader(), num_steps=8)
    assert len(rates.lr) == 8 and seen == [lr for lr in rates.lr for _ in range(3)]


def test_parameter_groups_keep_their_ratios():
    class Groups(Plain):
        def configure_optimizers(self):
            groups = [{"params": [self.body.weight], "lr": 0.2}, {"params": [self.body.bias], "lr": 0.5}]
            return torch.optim.SGD(groups)

    seen = []
    rates = find_learning_rate(make(), Groups(lambda self: seen.append(self.lrs[-1])), loader(), num_steps=10)
    assert [first for first, _ in seen] == rates.lr
    assert all(second == pytest.approx(2.5 * first) for first, second in seen)


# -- nothing is left behind ------------------------------------------------------------------------------------


class Fails(Exception):
    pass


def fail(model):
    if model.steps == 5:
        raise Fails


def interrupt(model):
    if model.steps == 5:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("on_step", "raised"),
    [(None, None), (fail, Fails), (interrupt, KeyboardInterrupt)],
    ids=["ends", "fails", "SIGINT"],
)
def test_everything_is_as_it_was(tmp_path, on_step, raised, accelerator):
    """A fit after the test equals one without it to the last bit, in its data order and its dropout too."""
    ends, handler = [], signal.getsignal(signal.SIGINT)
    for tested in (False, True):
        generator = torch.Generator().manual_seed(7)
        batches = loader(sampler=RandomSampler(DATA, generator=generator))
        logger = CSVLogger(tmp_path / str(tested))
        saver = ModelCheckpoint(tmp_path / f"saved {tested}", monitor=None)
        trainer = make(saver, max_epochs=2, logger=logger)
        model = Net(on_step if tested else None)
        model.train(False)
        torch.manual_seed(3)
        before = state_of(model)
        if tested:
            if raised is None:
                find_learning_rate(trainer, model, batches, num_steps=20)
            else:
                with pytest.raises(raised):
                    find_learning_rate(trainer, model, batches, num_steps=20)
            assert same(state_of(model), before) and not model.training and model.steps == 0
            assert not list(tmp_path.glob("True/**/*")) and not list(tmp_path.glob("saved True/**/*"))
            assert signal.getsignal(signal.SIGINT) is handler
            assert trainer.state.fn is None and trainer.callbacks == [saver] and trainer.loggers == [logger]
            assert all(parameter.grad is None for parameter in model.parameters())
            model.on_step = None
        trainer.fit(model, batches)
        ends.append((state_of(model), trainer.global_step, model.lrs, generator.get_state()))
    (state, *others), (tested_state, *tested_others) = ends
    assert same(state, tested_state) and others[:2] == tested_others[:2] and torch.equal(others[2], tested_others[2])


@pytest.mark.parametrize(
    ("signum", "said"),
    [
        (signal.SIGINT, "torchhal: stopping the search after this step; press Ctrl-C again to stop at once"),
        (signal.SIGTERM, "torchhal: search stopped on SIGTERM"),
    ],
)
def test_a_signal_is_answered_in_one_line(capfd, signum, said):
    def stop(model):
        if model.steps == 5:
            signal.raise_signal(signum)

    trainer = make()
    capfd.readouterr()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        find_learning_rate(trainer, Net(stop), loader(), num_steps=20)
    assert capfd.readouterr().err.strip().splitlines() == [said]


def test_between_two_fits():
    """The optimizer and the counters of an earlier fit are as they were, and the next fit goes on from them."""
    ends = []
    for tested in (False, True):
        torch.manual_seed(3)
        trainer, model = make(max_epochs=1), Net()
        trainer.fit(model, loader(shuffle=True))
        (optimizer,) = trainer.optimizers
        if tested:
            momenta = copy.deepcopy(optimizer.state_dict())
            find_learning_rate(trainer, model, loader(shuffle=True), num_steps=7)
            assert trainer.optimizers == [optimizer] and trainer.module is model and trainer.global_step == 12
            assert str(optimizer.state_dict()) == str(momenta)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader(shuffle=True))
        ends.append((state_of(model), trainer.global_step))
    assert same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1] == 24


def test_a_data_module_is_as_it_was():
    class Data(DataModule):
        made = 0
        rows = None

        def setup(self, stage):
            self.rows = DATA

        def train_dataloader(self):
            self.made += 1
            return DataLoader(self.rows, 8)

    data = Data()
    assert len(find_learning_rate(make(), Plain(), datamodule=data, num_steps=5).lr) == 5
    assert len(find_learning_rate(make(), Plain(), data, num_steps=5).lr) == 5
    assert data.rows is None and data.made == 0


def test_own_callbacks_take_no_part():
    class Counts(Callback):
        calls = 0

        def setup(self, trainer, module, stage):
            self.calls += 1

    class Own(Plain):
        def configure_callbacks(self):
            return [counts]

    counts = Counts()
    find_learning_rate(make(counts), Own(), loader(), num_steps=3)
    assert counts.calls == 0


# -- several processes -----------------------------------------------------------------------------------------


def on_a_rank(strategy, steps):
    from datetime import timedelta

    from torchhal.strategies import DDPStrategy

    trainer = make(strategy=DDPStrategy(timeout=timedelta(seconds=20)) if strategy == "object" else strategy, devices=2)
    rates = find_learning_rate(trainer, Plain(), loader(batch_size=4), min_lr=1e-3, max_lr=0.1, num_steps=steps)
    return rates.lr, rates.loss, trainer.strategy.is_set_up


@pytest.mark.parametrize("strategy", ["ddp", "object"])
def test_ranks_agree_on_the_mean(world2, strategy):
    """The losses of two ranks are those of one process on the joined batches."""
    one, other = world2.run(on_a_rank, strategy, 15, timeout=60)
    assert one == other and not one[2]
    order = [
        index for start in range(0, 96, 8) for index in (*range(start, start + 8, 2), *range(start + 1, start + 8, 2))
    ]
    batches = [(X[order[i : i + 8]], X[order[i : i + 8]].sum(1, keepdim=True)) for i in range(0, 96, 8)]
    assert one[1] == pytest.approx(losses_of_a_plain_loop(one[0], batches), rel=1e-4)


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "log"}, "'mode' must be 'exponential' or 'linear'"),
        ({"min_lr": 0}, "'min_lr' must be positive"),
        ({"min_lr": -1.0, "mode": "linear"}, "'min_lr' must be 0 or more"),
        ({"min_lr": 0.1, "max_lr": 0.1}, "'max_lr' must be a number above 'min_lr', 0.1"),
        ({"max_lr": math.nan}, "'max_lr' must be a number above"),
        ({"num_steps": 1}, "'num_steps' must be an int of at least 2"),
        ({"num_steps": 10.0}, "'num_steps' must be an int"),
        ({"stop_factor": 1}, "'stop_factor' must be above 1, or None"),
        ({"smoothing": 1.0}, "'smoothing' must be from 0 to below 1"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        find_learning_rate(make(), Plain(), loader(), **arguments)


def with_optimizers(optimizers):
    return type("Own", (Plain,), {"configure_optimizers": optimizers})()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_arguments_in_another_order():
    with pytest.raises(ConfigurationError, match=r"'trainer' must be a Trainer \(got a Plain"):
        find_learning_rate(Plain(), make(), loader())


@pytest.mark.filterwarnings("ignore:.*nothing is optimized")
def test_optimizers_that_do_not_fit():
    def groups(model):
        return torch.optim.SGD([{"params": [model.body.weight], "lr": 0.0}, {"params": [model.body.bias]}], lr=0.1)

    for optimizers, said in (
        (lambda model: [sgd(model), sgd(model)], "Own has 2 optimizers"),
        (lambda model: None, r"one optimizer for a range test \(got 0\)"),
        (groups, "the first one, which is 0"),
    ):
        with pytest.raises((ConfigurationError, ModelError), match=said):
            find_learning_rate(make(), with_optimizers(optimizers), loader())
    manual = Plain()
    manual.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="Plain steps its optimizers itself"):
        find_learning_rate(make(), manual, loader())


def test_what_cannot_be_put_back_is_refused():
    with pytest.raises(ModelError, match="can't put back the batches that it takes from a generator"):
        find_learning_rate(make(), Plain(), (batch for batch in loader()))
    model = Plain()
    model.lock = (each for each in "generators can't be copied")
    with pytest.raises(ConfigurationError, match="trains a copy of the model, and Plain can't be copied"):
        find_learning_rate(make(), model, loader())


def test_inside_of_a_run_it_is_refused():
    class Looks(Callback):
        def on_train_start(self, trainer, module):
            find_learning_rate(trainer, module, loader())

    with pytest.raises(ConfigurationError, match="find_learning_rate must be called before fit"):
        make(Looks()).fit(Plain(), loader())


# -- results ---------------------------------------------------------------------------------------------------


def measured():
    return find_learning_rate(make(), Plain(), loader(), num_steps=30)


def test_results_are_plain_data():
    rates = measured()
    read = json.loads(json.dumps(rates.to_dict()))
    assert read["lr"] == rates.lr and read["suggestion"] == rates.suggestion() is not None


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rates = measured()
    figure = rates.plot()
    figure.savefig(tmp_path / "lr.png")
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and (tmp_path / "lr.png").stat().st_size > 5000
    assert [*axes.lines[0].get_xdata()] == rates.lr and [*axes.lines[1].get_xdata()] == [rates.suggestion()]
    assert rates.plot(axes, suggest=False) is figure and len(axes.lines) == 3


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'torchhal\[report\]'"):
        LearningRates("linear", 0.0, 1.0, 2).plot()


def test_samplers_of_ones_own_are_as_they_were():
    class Epochs(RandomSampler):
        epoch = 4

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = Epochs(DATA, generator=torch.Generator().manual_seed(2))
    before = sampler.generator.get_state()
    find_learning_rate(make(), Plain(), DataLoader(DATA, batch_sampler=BatchSampler(sampler, 8, False)), num_steps=30)
    assert sampler.epoch == 4 and torch.equal(sampler.generator.get_state(), before)
