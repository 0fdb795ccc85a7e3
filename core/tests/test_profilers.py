"""Profilers of a fit: whose time is whose, what the trace holds, and that they change nothing."""

import json
import os
import subprocess
import sys
import time

import hardware
import pytest
import quiet_trainer
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchhal
from torchhal import Callback
from torchhal.errors import ConfigurationError
from torchhal.trainer.profilers import Profiler, SimpleProfiler, TorchProfiler

pytestmark = pytest.mark.usefixtures("accelerator")

NAP = 0.02
BATCHES = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).pow(2).mean())
        optimizer.step()


class WithClosure(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class Napping(Net):
    """A model each part of whose step takes one nap."""

    def training_step(self, batch, batch_idx):
        time.sleep(NAP)
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        time.sleep(NAP)
        loss.backward()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.state.stage == "train":
            time.sleep(NAP)
        return batch

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        time.sleep(NAP)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        time.sleep(NAP)
        optimizer.zero_grad()

    def validation_step(self, batch, batch_idx):
        time.sleep(NAP)


class NappingCallback(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(NAP)


class NappingData(Dataset):
    def __init__(self, seconds=NAP, length=6):
        self.seconds, self.length = seconds, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(3)


class Recording(Profiler):
    """A profiler of the user's own."""

    def __init__(self):
        self.said, self.open = [], []

    def setup(self, trainer):
        self.said.append("setup")

    def start(self, action):
        self.open.append(action)

    def stop(self, action):
        assert self.open.pop() == action
        self.said.append(action)

    def step(self):
        self.said.append("step")

    def teardown(self):
        self.said.append("teardown")

    def summary(self):
        return "a table"


def test_each_action_gets_its_own_time():
    profiler = SimpleProfiler()
    trainer = quiet_trainer.make(NappingCallback(), profiler=profiler, gradient_clip_val=1.0)
    began = time.perf_counter()
    trainer.fit(Napping(), DataLoader(NappingData()), [torch.ones(1, 3)] * 6)
    whole = time.perf_counter() - began
    times = profiler.times()
    naps = ("loader", "transfer", "forward", "backward", "clipping", "optimizer", "callbacks", "validation")
    assert all(times[action].seconds >= 6 * NAP for action in naps), times
    assert sum(each.seconds for each in times.values()) <= whole, "no second counts twice"
    assert times["fit"].seconds < 6 * NAP, "nothing of a nap is left to the loop itself"
    assert profiler.steps == times["forward"].calls == times["transfer"].calls == 6


def test_the_table_is_printed_once(capsys):
    quiet_trainer.make(profiler="simple", max_epochs=2).fit(Net(), BATCHES)
    out = capsys.readouterr().out
    assert out.count("profile of 12 step(s)") == 1
    rows = {line.split("  ")[0] for line in out.splitlines()}
    assert {"loader", "forward", "backward", "optimizer", "the loop itself"} <= rows
    shares = [float(line.split()[-2]) for line in out.splitlines() if line.endswith(" %")]
    assert sum(shares) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("model", [Net, ByHand, WithClosure])
@pytest.mark.parametrize("profiler", ["simple", "torch"])
def test_nothing_is_trained_differently(model, profiler, tmp_path):
    options = {} if model is not Net else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    weights = []
    for chosen in (None, profiler):
        module = model()
        trainer = quiet_trainer.make(profiler=chosen, max_epochs=2, default_root_dir=tmp_path, **options)
        attributes = set(vars(trainer.strategy)), set(vars(trainer.hooks)), set(vars(trainer.fit_loop))
        trainer.fit(module, BATCHES, BATCHES)
        replaced = {"backward", "optimizer_step", "clip_gradients", "call", "_validate"}
        after = set(vars(trainer.strategy)), set(vars(trainer.hooks)), set(vars(trainer.fit_loop))
        assert not set().union(*after) & replaced, attributes
        weights.append(module.layer.weight.detach().cpu())
    assert torch.equal(*weights)


def test_a_second_fit_is_measured_anew():
    profiler = SimpleProfiler()
    trainer = quiet_trainer.make(profiler=profiler)
    trainer.fit(Net(), BATCHES)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.module, BATCHES[:2])
    assert profiler.steps == 2


def test_a_profiler_of_ones_own(capsys):
    profiler = Recording()
    quiet_trainer.make(profiler=profiler).fit(Net(), BATCHES[:2])
    assert profiler.said[0] == "setup" and profiler.said[-1] == "teardown" and not profiler.open
    assert profiler.said.count("step") == profiler.said.count("forward") == 2
    assert profiler.said.index("forward") < profiler.said.index("backward") < profiler.said.index("step")
    assert "a table" in capsys.readouterr().out


def test_an_error_ends_every_action(capsys):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx:
                raise ZeroDivisionError("here")
            return super().training_step(batch, batch_idx)

    profiler = Recording()
    with pytest.raises(ZeroDivisionError, match="here"):
        quiet_trainer.make(profiler=profiler).fit(Fails(), BATCHES)
    assert not profiler.open and profiler.said.count("teardown") == 1


def test_a_region_of_ones_own():
    class Augments(Net):
        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("augment"):
                time.sleep(NAP)
            return super().training_step(batch, batch_idx)

    profiler = SimpleProfiler()
    quiet_trainer.make(profiler=profiler).fit(Augments(), BATCHES)
    times = profiler.times()
    assert times["augment"].calls == 6 and times["augment"].seconds >= 6 * NAP
    profiler.start("a")
    with pytest.raises(ValueError, match=r"got 'b'; running: 'a'"):
        profiler.stop("b")


@pytest.mark.parametrize("profiler", [None, "simple", "torch"])
def test_a_region_is_passed_through_where_nothing_is_measured(profiler):
    """A model with regions runs without a profiler too, and in an evaluation."""

    class Augments(Net):
        def validation_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("augment"):
                super().validation_step(batch, batch_idx)

        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("augment"):
                return super().training_step(batch, batch_idx)

    model = Augments()
    if profiler is None:
        quiet_trainer.make().fit(model, BATCHES, BATCHES)
    quiet_trainer.make(profiler=profiler).validate(model, BATCHES, verbose=False)


def test_an_error_that_passes_by_a_stop_is_the_one_that_is_raised():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            self.trainer.profiler.start("mine")
            raise ZeroDivisionError("here")

    class NoSummary(SimpleProfiler):
        def summary(self):
            raise KeyError("summary")

    for profiler in ("simple", NoSummary()):
        with pytest.raises(ZeroDivisionError, match="here"):
            quiet_trainer.make(profiler=profiler).fit(Fails(), BATCHES)
    with pytest.raises(KeyError, match="summary"):
        quiet_trainer.make(profiler=NoSummary()).fit(Net(), BATCHES)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("simpel", "did you mean 'simple'"),
        (SimpleProfiler, r"make an object, SimpleProfiler\(\)"),
        (3, r"must be None, 'simple', 'torch' or an object of a subclass of .*Profiler \(got 3\)"),
    ],
)
def test_what_is_no_profiler(value, said):
    with pytest.raises(ConfigurationError, match=said):
        quiet_trainer.make(profiler=value)


# -- the trace -----------------------------------------------------------------------------------------------------


def regions(path):
    with open(path) as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_a_trace_of_the_steps_that_were_asked_for(tmp_path, capfd):
    profiler = TorchProfiler(tmp_path, wait=1, warmup=1, active=2, row_limit=100)
    trainer = quiet_trainer.make(profiler=profiler)
    trainer.fit(Net(), BATCHES)
    path = tmp_path / "trace_rank0.json"
    assert profiler.trace_path == str(path)
    assert {"forward", "backward", "optimizer", "loader", "ProfilerStep#2", "ProfilerStep#3"} <= regions(path)
    assert "ProfilerStep#4" not in regions(path)
    out = capfd.readouterr().out
    assert str(path) in out and "aten::addmm" in out and "the loop itself" in out
    path.unlink()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.module, BATCHES)
    assert "forward" in regions(path), "the next fit has a trace of its own"


def test_a_fit_that_is_shorter_than_the_schedule(tmp_path, capfd):
    quiet_trainer.make(profiler=TorchProfiler(tmp_path, wait=4, warmup=1, active=9)).fit(Net(), BATCHES)
    assert "forward" in regions(tmp_path / "trace_rank0.json"), "what was recorded is written at the end"
    quiet_trainer.make(profiler=TorchProfiler(tmp_path / "b", wait=50)).fit(Net(), BATCHES)
    assert not list((tmp_path / "b").iterdir())
    assert "it begins with step 53, and the fit had 6" in capfd.readouterr().out


def test_what_torch_profiler_refuses(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="can't write to"):
        quiet_trainer.make(profiler=TorchProfiler(tmp_path / "file" / "x")).fit(Net(), BATCHES)
    with pytest.raises(ConfigurationError, match="must be those of torch"):
        quiet_trainer.make(profiler=TorchProfiler(tmp_path, nonsense=1)).fit(Net(), BATCHES)
    with pytest.raises(ConfigurationError, match="'schedule' is TorchProfiler's own"):
        TorchProfiler(schedule=None)
    with pytest.raises(ConfigurationError, match="'active' must be"):
        TorchProfiler(active=0)


def fit_on_two_ranks(strategy, folder):
    profiler = TorchProfiler(folder, wait=1, warmup=1, active=1)
    quiet_trainer.make(profiler=profiler, strategy=strategy, devices=2).fit(
        Net(), DataLoader(torch.cat(BATCHES), batch_size=3), DataLoader(torch.cat(BATCHES))
    )


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_every_rank_has_a_trace(tmp_path, strategy, capfd):
    if strategy == "ddp_spawn":
        fit_on_two_ranks(strategy, tmp_path)
        out = capfd.readouterr().out
    elif hardware.name() != "cpu":
        pytest.skip("a process that has used the accelerator can't be forked")
    else:  # nor this one, which may have used one in another test
        call = f"import test_profilers; test_profilers.fit_on_two_ranks({strategy!r}, {str(tmp_path)!r})"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
        out = subprocess.run(
            [sys.executable, "-c", call], check=True, stdout=subprocess.PIPE, text=True, timeout=120, env=environ
        ).stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace_rank0.json", "trace_rank1.json"]
    assert "\ncommunication" in out and out.count("profile of") == 1


# -- a slow loader ---------------------------------------------------------------------------------------------------


def test_a_slow_loader_is_named_once(recwarn):
    trainer = quiet_trainer.make(profiler="simple", max_epochs=3)
    trainer.fit(Net(), DataLoader(NappingData(0.004, 30)))
    said = [str(each.message) for each in recwarn if "bottleneck" in str(each.message)]
    assert len(said) == 1
    assert "over 50 batches" in said[0] and "num_workers=" in said[0] and "it has num_workers=0" in said[0]


def test_no_word_of_a_fast_loader(recwarn):
    quiet_trainer.make(profiler="simple").fit(Napping(), BATCHES * 10)
    assert not [each for each in recwarn if "bottleneck" in str(each.message)]


def test_no_word_without_a_profiler(recwarn):
    quiet_trainer.make().fit(Net(), DataLoader(NappingData(0.004, 60)))
    assert not [each for each in recwarn if "bottleneck" in str(each.message)]
