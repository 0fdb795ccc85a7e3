"""Test the hooks of a strategy for the phases of a run: their order, their pairs, and where they may communicate."""

import os
import signal
import warnings

import pytest
import torch
from quiet_trainer import make
from torch.utils.data import DataLoader

from torchhal import Callback, Module
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy, StepResult
from torchhal.strategies._hooks import StrategyHooks
from torchhal.trainer.callbacks import ModelCheckpoint
from torchhal.trainer.loops import DataPositionChanged
from torchhal.trainer.loops._batch_hooks import evaluation_batch_hooks, train_batch_end, train_batch_start

HOOKS = sorted(name for name in vars(StrategyHooks) if name.startswith("on_"))
STEPS = 4
BATCHES = [torch.full((2, 3), float(index)) for index in range(STEPS)]


class Recording:
    """A strategy that records each hook and what of its arguments identifies the call."""

    def __init__(self, **options):
        super().__init__(**options)
        self.log = []
        self.failures = []

    def record(self, name, *told):
        self.log.append(" ".join([name, *map(str, told)]))

    def on_train_start(self):
        self.record("train_start")

    def on_train_end(self):
        self.record("train_end")

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.record("epoch_start")

    def on_train_epoch_end(self):
        self.record("epoch_end")

    def on_train_batch_start(self, batch, batch_idx):
        assert batch.device == self.root_device
        self.record("batch_start", batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs.grad_fn is None
        self.record("batch_end", batch_idx)

    def on_evaluation_start(self, stage):
        assert not torch.is_grad_enabled() and not self.module.training
        self.record("start", stage)

    def on_evaluation_end(self, stage):
        assert self.failure or not (torch.is_grad_enabled() or self.module.training)
        self.record("end", stage)

    def on_evaluation_batch_start(self, stage, batch, batch_idx, dataloader_idx):
        self.record("start", stage, dataloader_idx, batch_idx)

    def on_evaluation_batch_end(self, stage, outputs, batch, batch_idx, dataloader_idx):
        self.record("end", stage, dataloader_idx, batch_idx)

    def on_exception(self, error):
        self.record("exception", type(error).__name__)
        self.failures.append(self.failure)


class Recorded(Recording, SingleDeviceStrategy):
    pass


class RecordedDDP(Recording, DDPStrategy):
    """Each hook that may communicate does: a rank that left one out would hang, or add up other numbers."""

    def record(self, name, *told):
        if name in {"batch_start", "batch_end"} or (name in {"start", "end"} and len(told) == 1):
            told = (*told, self.reduce(1, "sum"))
        elif name != "exception" and len(told) == 0:
            told = (self.reduce(1, "sum"),)
        super().record(name, *told)


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.layer(batch).sum()

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def evaluation(stage, count, loader=0):
    steps = [f"{side} {stage} {loader} {index}" for index in range(count) for side in ("start", "end")]
    return [f"start {stage}", *steps, f"end {stage}"]


def batches(*indices):
    return [f"batch_{side} {index}" for index in indices for side in ("start", "end")]


class At(Callback):
    """Calls ``act(trainer)`` once after so many training batches."""

    def __init__(self, count, act):
        self.count, self.act = count, act

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count -= 1
        if self.count == 0:
            self.act(trainer)


def test_hooks_of_fit():
    strategy = Recorded()
    make(strategy=strategy, max_epochs=2, num_sanity_val_steps=1, val_check_interval=2).fit(Net(), BATCHES, BATCHES[:2])
    validated = evaluation("validate", 2)
    epoch = ["epoch_start", *batches(0, 1), *validated, *batches(2, 3), *validated, "epoch_end"]
    assert strategy.log == [*evaluation("sanity_check", 1), "train_start", *epoch, *epoch, "train_end"]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_hooks_of_evaluation(stage):
    """Batches are counted for each loader; there is one start and one end."""
    strategy = Recorded()
    getattr(make(strategy=strategy), stage)(Net(), [DataLoader(BATCHES[:2], None), DataLoader(BATCHES[:1], None)])
    first, second = evaluation(stage, 2), evaluation(stage, 1, loader=1)
    assert strategy.log == [*first[:-1], *second[1:]]


@pytest.mark.parametrize("fn", ["fit", "validate"])
def test_strategy_is_called_last(fn):
    """After the callbacks' and the module's hook of the same name, in start and end hooks alike."""
    order = []

    def recording(who, base, names, *bases):
        def hook(name):
            def body(self, *args):
                if getattr(type(self), "armed", True):
                    order.append((name, who))

            return body

        return type(who, (*bases, base), {name: hook(name) for name in names})

    shared = [name for name in HOOKS if name.startswith("on_train")]
    of_others = {
        "on_evaluation_start": "on_validation_start", "on_evaluation_end": "on_validation_end",
        "on_evaluation_batch_start": "on_validation_batch_start", "on_evaluation_batch_end": "on_validation_batch_end",
    }  # fmt: skip
    names = [*shared, *of_others.values()]
    strategy = recording("strategy", SingleDeviceStrategy, [*shared, *of_others])()
    callback, module = recording("callback", Callback, names)(), recording("module", Net, names)()
    make(callback, strategy=strategy).fit(module, BATCHES, BATCHES[:1])
    for name in names:
        own = next((mine for mine, theirs in of_others.items() if theirs == name), name)
        called = [who for hook, who in order if hook in (name, own)]
        assert called[:3] == ["callback", "module", "strategy"], name
        assert called == called[:3] * (len(called) // 3), name


def test_resume_in_mid_epoch(tmp_path):
    """The rest of an epoch begins with on_train_epoch_start, and its first batch has the next index."""
    path = str(tmp_path / "some.ckpt")
    make(At(2, lambda trainer: trainer.save_checkpoint(path)), strategy=Recorded()).fit(Net(), BATCHES)
    strategy = Recorded()
    make(strategy=strategy).fit(Net(), BATCHES, ckpt_path=path)
    assert strategy.log == ["train_start", "epoch_start", *batches(2, 3), "epoch_end", "train_end"]


def test_nothing_to_do_starts_nothing():
    strategy = Recorded()
    model, trainer = Net(), make(strategy=strategy, max_epochs=1)
    trainer.fit(model, BATCHES)
    strategy.log.clear()
    with pytest.warns(UserWarning, match="nothing to do"):
        trainer.fit(model, BATCHES)
    assert strategy.log == []


@pytest.mark.parametrize("how", ["should_stop", "max_steps"])
def test_stop_in_mid_epoch(how):
    strategy = Recorded()
    stop = At(2, lambda trainer: setattr(trainer, "should_stop", how == "should_stop"))
    make(stop, strategy=strategy, max_steps=2 if how == "max_steps" else -1).fit(Net(), BATCHES)
    assert strategy.log == ["train_start", "epoch_start", *batches(0, 1), "epoch_end", "train_end"]


def test_module_ends_epoch():
    """A batch that the module refuses has no hook of the strategy."""

    class Refuses(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

    strategy = Recorded()
    make(strategy=strategy).fit(Refuses(), BATCHES)
    assert strategy.log == ["train_start", "epoch_start", *batches(0), "epoch_end", "train_end"]


@pytest.mark.parametrize("during", ["training", "validation"])
def test_stop_by_signal(tmp_path, during):
    """Open phases end once all ranks have stopped and the run is saved; the exception is no failure."""

    class Late(Recorded):
        def on_train_end(self):
            self.saved = sorted(path.name for path in tmp_path.glob("interrupted*"))
            super().on_train_end()

    class Kills(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if during == "training" and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
            if during == "validation" and batch_idx == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    strategy = Late()
    with pytest.raises(SystemExit):
        make(Kills(), ModelCheckpoint(tmp_path), strategy=strategy).fit(Net(), BATCHES, BATCHES)
    cut = [] if during == "training" else [*evaluation("validate", 1)]
    done = batches(0, 1) if during == "training" else batches(0, 1, 2, 3)
    assert strategy.log == [
        "train_start", "epoch_start", *done, *cut, "epoch_end", "train_end", "exception SystemExit",
    ]  # fmt: skip
    assert len(strategy.saved) == 1
    assert strategy.failures == [None]


class Broken(Net):
    """Raises in one of its steps, at batch 1."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def training_step(self, batch, batch_idx):
        if self.where == "training_step" and batch_idx == 1:
            raise ValueError("broken")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.where == "validation_step" and batch_idx == 1:
            raise ValueError("broken")
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_error_in_step(where):
    """on_exception comes first, then the ends of what had started, the innermost first, all with ``failure`` set."""
    strategy = Recorded()
    told = []
    strategy.on_train_end = lambda: told.append(strategy.failure)
    with pytest.raises(ValueError, match="broken") as caught:
        make(strategy=strategy).fit(Broken(where), BATCHES, BATCHES)
    begun = ["train_start", "epoch_start"]
    if where == "training_step":
        expected = [*begun, *batches(0), "batch_start 1", "exception ValueError", "epoch_end"]
    else:
        cut = evaluation("validate", 1)
        expected = [*begun, *batches(0, 1, 2, 3), *cut[:-1], "start validate 0 1", "exception ValueError", cut[-1]]
        expected.append("epoch_end")
    assert strategy.log == expected
    assert told == [caught.value] and strategy.failures == [caught.value]
    assert strategy.failure is None  # after the tear-down


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_evaluation_start"])
def test_start_that_raises_has_no_end(hook):
    strategy = Recorded()

    def refuse(*args):
        raise ValueError(hook)

    setattr(strategy, hook, refuse)
    with pytest.raises(ValueError, match=hook):
        make(strategy=strategy).fit(Net(), BATCHES, BATCHES)
    ends = {"on_train_start": 2, "on_train_epoch_start": 1, "on_evaluation_start": 0}[hook]
    assert strategy.log[strategy.log.index("exception ValueError") + 1 :] == ["epoch_end", "train_end"][ends:]


def test_end_that_raises(caplog):
    """In a run without an error it is the error; after one it is logged, and the ends that are left are called."""

    class Fails(Recorded):
        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            raise RuntimeError("in the end hook")

    strategy = Fails()
    with pytest.raises(RuntimeError, match="in the end hook"):
        make(strategy=strategy).fit(Net(), BATCHES)
    assert strategy.log.count("epoch_end") == 1 and strategy.log[-1] == "train_end"
    strategy = Fails()
    with pytest.raises(ValueError, match="broken"):
        make(strategy=strategy).fit(Broken("training_step"), BATCHES)
    assert strategy.log[-2:] == ["epoch_end", "train_end"]
    assert "in the end hook" in caplog.text


def test_phases_of_next_run(tmp_path):
    """A failed run leaves nothing open for the next one of the same Trainer."""
    strategy = Recorded()
    trainer = make(strategy=strategy)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(Broken("training_step"), BATCHES)
    strategy.log.clear()
    trainer.validate(Net(), BATCHES[:1])
    assert strategy.log == evaluation("validate", 1)


class OwnsStep(Recorded):
    features = frozenset({"owns_step"})

    def step_function(self, name):
        step = super().step_function(name)

        def run(*args):
            loss = step(*args)
            if name == "training_step":
                self.optimizers[0].zero_grad()
                loss.backward()
                self.optimizers[0].step()
            return loss.detach()

        return run

    def optimizer_step(self, optimizer, closure=None):
        return StepResult.UPDATED


def test_hooks_under_owns_step():
    strategy = OwnsStep()
    make(strategy=strategy).fit(Net(), BATCHES[:2])
    assert strategy.log == ["train_start", "epoch_start", *batches(0, 1), "epoch_end", "train_end"]


class Repositions(Recorded):
    """Takes over the counters of others at batch 1, which are two batches further."""

    def step_function(self, name):
        step = super().step_function(name)

        def run(batch, batch_idx, *rest):
            loop = self.trainer.fit_loop
            if name == "training_step" and batch_idx == 1:
                loop.batches_done = 3
                raise DataPositionChanged
            return step(batch, batch_idx, *rest)

        return run


def test_position_changes():
    """The part of an epoch that ends there has its own start and end; its last batch has no end."""
    strategy = Repositions()
    make(strategy=strategy).fit(Net(), BATCHES)
    rest = ["epoch_end", "epoch_start", *batches(3), "epoch_end"]
    assert strategy.log == ["train_start", "epoch_start", *batches(0), "batch_start 1", *rest, "train_end"]


def test_no_hooks_cost_nothing():
    """Without overrides there is no function to call for a batch."""
    found = []

    class Looks(Callback):
        def on_train_start(self, trainer, module):
            run = trainer._run
            found.extend([train_batch_start(run), train_batch_end(run)])
            found.extend(evaluation_batch_hooks(run, "validate", "validation"))

    make(Looks()).fit(Net(), BATCHES)
    assert found == [None] * 4


def test_random_numbers_of_start_hook(tmp_path):
    """What a start hook draws doesn't change what a run that continues a checkpoint draws."""

    class Draws(Recorded):
        def on_train_start(self):
            torch.rand(self.draws)

        on_train_epoch_start = on_train_start

    class Noisy(Net):
        def training_step(self, batch, batch_idx):
            self.drawn = torch.rand(1).item()
            return super().training_step(batch, batch_idx) * self.drawn

    path = str(tmp_path / "some.ckpt")
    make(At(2, lambda trainer: trainer.save_checkpoint(path)), strategy=SingleDeviceStrategy()).fit(Noisy(), BATCHES)
    drawn = []
    for draws in (0, 5):
        strategy, model = Draws(), Noisy()
        strategy.draws = draws
        make(strategy=strategy).fit(model, BATCHES, ckpt_path=path)
        drawn.append(model.drawn)
    assert drawn[0] == drawn[1]


# -- several ranks ---------------------------------------------------------------------------------------------


def fit_in_ranks(how, folder):
    strategy = RecordedDDP()
    rank = int(os.environ["RANK"])

    def stop(trainer):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    class Alone(RecordedDDP):
        def record(self, name, *told):
            Recording.record(self, name, *told)

    model = Net()
    callbacks = [ModelCheckpoint(folder)]
    if how == "error":
        strategy, model = Alone(), Broken("training_step")
    elif how == "signal":
        callbacks.append(At(2, stop))
    trainer = make(*callbacks, strategy=strategy, devices=2, max_epochs=1 if how != "signal" else 9)
    try:
        trainer.fit(model, [batch + rank for batch in BATCHES], BATCHES[:1])
    except BaseException as error:
        return strategy.log, type(error).__name__
    return strategy.log, ""


def test_hooks_communicate(world2, tmp_path):
    """Each start and end is reached by all ranks at the same step."""
    (first, said), (second, _) = world2.run(fit_in_ranks, "whole", str(tmp_path))
    assert first == second and said == ""
    plain = [entry.rsplit(" ", 1)[0] if " " in entry and "validate 0" not in entry else entry for entry in first]
    assert plain == [
        "train_start", "epoch_start", *batches(*range(STEPS)), *evaluation("validate", 1), "epoch_end", "train_end",
    ]  # fmt: skip
    assert {entry.rsplit(" ", 1)[1] for entry in first if "validate 0" not in entry} == {"2"}


def test_hooks_communicate_after_signal(world2, tmp_path):
    """A signal on one rank ends the phases of both, which still communicate."""
    (first, said), (second, other) = world2.run(fit_in_ranks, "signal", str(tmp_path))
    assert first == second and said == other == "SystemExit"
    assert first[-3:] == ["epoch_end 2", "train_end 2", "exception SystemExit"]


def test_ends_after_error_on_each_rank(world2, tmp_path):
    for log, said in world2.run(fit_in_ranks, "error", str(tmp_path), timeout=60):
        assert said in {"ValueError", "RankFailedError"}
        assert log[-3:] == [f"exception {said}", "epoch_end", "train_end"]


# -- names of before, and of others ------------------------------------------------------------------------------


class OldPlugin(SingleDeviceStrategy):
    epochs = 0

    def begin_epoch(self):
        super().begin_epoch()
        self.epochs += 1


class BothNames(Recorded):
    def begin_epoch(self):
        raise AssertionError("the new name wins within one class")

    def on_train_epoch_start(self):
        super().on_train_epoch_start()


class Newer(OldPlugin):
    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.epochs += 10


def test_begin_epoch_still_acts():
    strategy = OldPlugin()
    with pytest.warns(FutureWarning, match="OldPlugin.begin_epoch is deprecated since torchhal 0.2 and goes in 1.0"):
        make(strategy=strategy, max_epochs=2).fit(Net(), BATCHES)
    assert strategy.epochs == 2


def test_old_subclass_of_ddp_follows_freezing(monkeypatch):
    """``super().begin_epoch()`` reaches what core's strategies do at the start of an epoch."""
    called = []

    class Old(DDPStrategy):
        def begin_epoch(self):
            super().begin_epoch()
            called.append("old")

    monkeypatch.setattr(DDPStrategy, "on_train_epoch_start", lambda self: called.append("ddp"))
    with pytest.warns(FutureWarning, match="begin_epoch"):
        make(strategy=Old()).fit(Net(), BATCHES)
    assert called == ["ddp", "old"]


@pytest.mark.parametrize(("cls", "epochs"), [(BothNames, None), (Newer, 10)])
def test_new_name_wins(cls, epochs):
    strategy = cls()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        make(strategy=strategy).fit(Net(), BATCHES)
    assert epochs is None or strategy.epochs == epochs


def test_begin_epoch_of_loop_by_hand():
    class Counts(SingleDeviceStrategy):
        def on_train_epoch_start(self):
            self.started = True

    strategy = Counts()
    with pytest.warns(FutureWarning, match="on_train_epoch_start instead"):
        strategy.begin_epoch()
    assert strategy.started


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_validation_start", "on_evaluation_start"),
        ("on_test_batch_end", "on_evaluation_batch_end"),
        ("on_fit_start", "use a callback"),
    ],
)
def test_hooks_of_others_warn(name, meant):
    strategy = type("Ported", (SingleDeviceStrategy,), {name: lambda self: None})()
    with pytest.warns(UserWarning, match=f"Ported.{name} is no hook of strategies.*{meant}"):
        make(strategy=strategy).fit(Net(), BATCHES)


def test_bodies_are_empty():
    """An override needs no ``super()`` call to keep anything of the base class."""
    strategy = SingleDeviceStrategy.__new__(SingleDeviceStrategy)
    arguments = {"on_exception": (ValueError(),), "on_evaluation_start": ("test",), "on_evaluation_end": ("test",)}
    arguments.update(on_train_batch_start=(None, 0), on_train_batch_end=(None, None, 0))
    arguments.update(on_evaluation_batch_start=("test", 0, 0, 0), on_evaluation_batch_end=("test", 0, 0, 0, 0))
    for name in HOOKS:
        assert getattr(strategy, name)(*arguments.get(name, ())) is None
    assert vars(strategy) == {}


class Shrinking(SingleDeviceStrategy):
    """Changes weights and its own state at the end of each epoch, as local SGD averages there."""

    ended = 0

    def on_train_epoch_end(self):
        self.ended += 1
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(0.5)

    def state_dict(self):
        return {**super().state_dict(), "ended": self.ended}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.ended = state.get("ended", 0)


def test_a_checkpoint_of_an_epochs_end_has_what_the_strategy_did_there(tmp_path):
    saves = {
        "end": {},
        "last_step": {"every_n_train_steps": STEPS, "save_on_train_epoch_end": False},
        "validated": {"save_on_train_epoch_end": False},
        "stopped": {},
    }

    def fit(name, ckpt_path=None):
        torch.manual_seed(0)
        model, strategy = Net(), Shrinking()
        folder = tmp_path / (name if ckpt_path is None else f"{name}-again")
        saving = ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **saves[name])
        stops = name == "stopped" and ckpt_path is None
        trainer = make(saving, strategy=strategy, max_epochs=3, max_steps=STEPS + 1 if stops else -1)
        trainer.fit(model, BATCHES, BATCHES, ckpt_path=ckpt_path)
        return strategy.ended, [parameter.detach().clone() for parameter in model.parameters()]

    for name in saves:
        ended, whole = fit(name)
        if name == "stopped":
            ended, whole = fit("end")
        for path in sorted((tmp_path / name).glob("*.ckpt"))[:2]:
            again, resumed = fit(name, path)
            assert (ended, again) == (3, 3), (name, path.name)
            assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True)), (name, path.name)
