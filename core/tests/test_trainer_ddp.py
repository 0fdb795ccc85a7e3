"""ddp through the Trainer, in real processes: the numbers of one process, and every way to fail."""

import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import hardware
import pytest
import torch
import torch.distributed as dist
from limits import scaled
from tiers import slow
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from world import joined

from torchhal import Callback, ModelCheckpoint, Module, Trainer
from torchhal.distributed import collectives
from torchhal.errors import DistributedError, ModelError
from torchhal.strategies import DDPStrategy, ParallelStrategy
from torchhal.strategies import _ddp_buckets as ddp_buckets
from torchhal.strategies._replica_consistency import find_difference

pytestmark = pytest.mark.slow_on_sim

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


class Run:
    def __init__(self, process, out, seconds):
        self.code = process.returncode
        self.stdout, self.stderr = process.communicated
        self.out = out
        self.seconds = seconds

    def rank(self, rank):
        return torch.load(self.out / f"rank{rank}.pt", weights_only=False)


def start(out, *, command=None, **config):
    out.mkdir(exist_ok=True)
    config["out"] = str(out)
    environment = {**os.environ, "TORCHHAL_TEST_MARK": str(out), "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [*(command or [sys.executable]), str(SCRIPT), json.dumps(config)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, out, timeout=150):
    began = time.monotonic()
    try:
        process.communicated = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicated = process.communicate()
        pytest.fail(f"hung for {timeout} s\n{process.communicated[1][-4000:]}")
    return Run(process, out, time.monotonic() - began)


def run(out, *, command=None, timeout=150, **config):
    return finish(start(out, command=command, **config), out, timeout)


def leftovers(out):
    """Processes of this run that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"TORCHHAL_TEST_MARK={out}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def assert_nothing_left(out):
    deadline = time.monotonic() + scaled(5)
    while leftovers(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not leftovers(out)


def single_process(epochs=3, global_batch=16, n=48):
    """One process on the joined batches: rank r has samples r, r + 2, ... of each epoch."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import train
    finally:
        sys.path.pop(0)
    torch.manual_seed(0)
    model = train.Net({})
    optimizer = model.configure_optimizers()
    x, y, _ = train.dataset(n)[:]
    for _ in range(epochs):
        for begin in range(0, n, global_batch):
            optimizer.zero_grad()
            F.cross_entropy(model.body(x[begin : begin + global_batch]), y[begin : begin + global_batch]).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"optimizer": {"lr": 0.2}}, r"the same optimizers \(rank 0 has \['SGD\(.*lr=0.1.*rank 1 has \['SGD\(.*lr=0.2"),
        ({"trainer": {"gradient_clip_val": 0.1}}, r"the same gradient_clip_val \(rank 0 has None, rank 1 has 0.1\)"),
        ({"trainer": {"accumulate_grad_batches": 2}}, r"accumulate_grad_batches \(rank 0 has 1, rank 1 has 2\)"),
    ],
)
def test_ranks_that_would_step_differently_are_refused(tmp_path, differs, said):
    """Their gradients are the same, and their weights would part without a word."""
    result = run(tmp_path / "run", of_rank_1=differs)
    assert result.code == 1
    assert re.search(said, result.stderr), result.stderr


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_equals_one_process_on_the_joined_batch(tmp_path, strategy, accelerator):
    result = run(tmp_path / "run", trainer={"strategy": strategy}, evaluate=True)
    assert result.code == 0, result.stderr
    expected = single_process().state_dict()
    ranks = [0, 1] if strategy == "ddp" else [0]  # the caller of spawn is no rank: it has rank 0's results
    for rank in ranks:
        outcome = result.rank(rank)
        if strategy == "ddp":
            assert outcome["ran_on"] == {"cpu" if accelerator == "cpu" else f"{accelerator}:{rank}"}
        for name, value in outcome["state"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        assert (outcome["steps"], outcome["epoch"]) == (9, 3)
        # each of the 21 validation samples once, although 21 is odd
        assert outcome["metrics"]["count"] == 21
        assert outcome["validate"][0]["count"] == 21
        assert outcome["predict"].tolist() == list(range(21))
    if strategy == "ddp":
        zero, one = result.rank(0), result.rank(1)
        assert all(torch.equal(zero["state"][name], one["state"][name]) for name in expected)
        assert zero["metrics"]["val_loss"] == one["metrics"]["val_loss"]
        assert zero["metrics"]["train_loss"] == one["metrics"]["train_loss"]
        seen = [[i for step in rank["seen"] if isinstance(step, list) for i in step] for rank in (zero, one)]
        assert sorted(seen[0][:24] + seen[1][:24]) == list(range(48))
        val = [i for rank in (zero, one) for entry in rank["seen"] if isinstance(entry, tuple) for i in entry[1:]]
        # once in each of three epochs and in validate(); the sanity check takes the first 8 of each rank's block
        assert {val.count(index) for index in (8, 9, 10, 19, 20)} == {4}
    assert_nothing_left(tmp_path / "run")


@pytest.mark.usefixtures("accelerator")
def test_metrics_are_those_of_all_samples(tmp_path):
    result = run(tmp_path / "run", trainer={"max_epochs": 1})
    model = nn.Module()
    outcome = result.rank(0)
    reference = single_process(epochs=1)
    sys.path.insert(0, str(SCRIPT.parent))
    import train

    x, y, _ = train.dataset(21)[:]
    model = reference
    expected = F.cross_entropy(model.body(x), y)
    torch.testing.assert_close(outcome["metrics"]["val_loss"].float(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("accelerator")
def test_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = run(tmp_path / "run", command=command)
    assert result.code == 0, result.stderr
    expected = single_process().state_dict()
    for rank in (0, 1):
        for name, value in result.rank(rank)["state"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("accelerator")
def test_accumulation_and_clipping_over_ranks(tmp_path):
    result = run(
        tmp_path / "run",
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 1},
        batch_size=4,
    )
    assert result.code == 0, result.stderr
    sys.path.insert(0, str(SCRIPT.parent))
    import train

    torch.manual_seed(0)
    model = train.Net({})
    optimizer = model.configure_optimizers()
    x, y, _ = train.dataset()[:]
    for begin in range(0, 48, 16):
        optimizer.zero_grad()
        F.cross_entropy(model.body(x[begin : begin + 16]), y[begin : begin + 16]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    for name, value in result.rank(1)["state"].items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert result.rank(1)["steps"] == 3


# "hang" once: what a time-out does is the same code for every launcher
@pytest.mark.parametrize(
    ("strategy", "misdeed"),
    [
        slow("ddp", "hang"),
        *(("ddp", misdeed) for misdeed in ("raise", "exit", "kill")),
        *(slow("ddp_spawn", misdeed) for misdeed in ("raise", "exit", "kill")),
    ],
)
def test_one_rank_fails_and_all_end(tmp_path, strategy, misdeed):
    config = {"trainer": {"strategy": strategy}, "misdeed": misdeed}
    if misdeed == "hang":
        config["collective_timeout"] = 8
    result = run(tmp_path / "run", timeout=100, **config)
    assert result.code not in (0, None)
    assert result.seconds < scaled(100)  # of a loaded machine; a process group alone would wait for minutes
    text = result.stderr
    if misdeed == "raise":
        first = text.index("ZeroDivisionError: the model of rank 1 is broken")
        assert "Connection closed" not in text[:first]
    if misdeed == "kill":
        assert "SIGKILL" in text
    assert "rank 1" in text or "Rank 1" in text
    assert_nothing_left(tmp_path / "run")


@pytest.mark.parametrize(
    ("misdeed", "code"), [("sigterm", 143), slow("sigterm_group", 143), slow("sigint_group", 130)], ids=str
)
@pytest.mark.parametrize("workers", [0, slow(1)])
def test_a_signal_ends_all_ranks_at_one_step_with_a_checkpoint(tmp_path, misdeed, code, workers):
    out = tmp_path / "run"
    result = run(
        out, misdeed=misdeed, workers=workers, slow=True, trainer={"enable_checkpointing": True, "max_epochs": 60}
    )
    assert result.code in (code, code - 128 if code > 128 else code, -(code - 128)), result.stderr
    found = sorted((out / "ckpt").glob("*.ckpt"))
    assert found, result.stderr
    saved = [torch.load(path, weights_only=True) for path in found]
    name = "SIGINT" if code == 130 else "SIGTERM"
    assert f"torchhal: fit stopped on {name} at step" in result.stderr
    assert f"saved {out}/ckpt/interrupted-" in result.stderr
    newest = max(saved, key=lambda checkpoint: checkpoint["global_step"])
    assert newest["global_step"] >= 4
    assert_nothing_left(out)
    # and the run goes on from there to the end
    again = run(out, trainer={"enable_checkpointing": True, "max_epochs": newest["epoch"] + 2}, ckpt_path="last")
    assert again.code == 0, again.stderr
    assert again.rank(0)["steps"] == 3 * (newest["epoch"] + 2)
    assert torch.equal(again.rank(0)["state"]["body.0.weight"], again.rank(1)["state"]["body.0.weight"])


@pytest.mark.usefixtures("accelerator")
def test_an_interrupted_run_equals_one_left_alone(tmp_path):
    left_alone = run(tmp_path / "alone", shuffle=True, trainer={"max_epochs": 6})
    stopped = run(
        tmp_path / "run",
        shuffle=True,
        misdeed="sigterm",
        slow=True,
        trainer={"max_epochs": 6, "enable_checkpointing": True},
    )
    assert stopped.code == 143
    resumed = run(
        tmp_path / "run", shuffle=True, ckpt_path="last", trainer={"max_epochs": 6, "enable_checkpointing": True}
    )
    assert resumed.code == 0, resumed.stderr
    for name, value in left_alone.rank(0)["state"].items():
        assert torch.equal(value, resumed.rank(0)["state"][name]), name


@pytest.mark.slow
def test_a_signal_inside_validation(tmp_path):
    out = tmp_path / "run"
    config = {"shuffle": True, "trainer": {"max_epochs": 4, "enable_checkpointing": True}}
    left_alone = run(tmp_path / "alone", **config)
    stopped = run(out, misdeed="sigterm", where="validation", at=3, **config)
    assert stopped.code == 143, stopped.stderr
    resumed = run(out, ckpt_path="last", **config)
    assert resumed.code == 0, resumed.stderr
    assert torch.equal(left_alone.rank(0)["state"]["body.0.weight"], resumed.rank(0)["state"]["body.0.weight"])


@pytest.mark.slow
def test_a_signal_inside_a_validation_that_communicates(tmp_path):
    out = tmp_path / "run"
    config = {"val_sync": True, "val": 24, "trainer": {"max_epochs": 4, "enable_checkpointing": True}}
    stopped = run(out, misdeed="sigterm", where="validation", at=3, **config)
    assert stopped.code == 143, stopped.stderr
    assert list((out / "ckpt").glob("*.ckpt"))


@pytest.mark.slow
def test_fewer_validation_samples_than_ranks(tmp_path):
    result = run(tmp_path / "run", val=1, trainer={"enable_checkpointing": True})
    assert result.code == 0, result.stderr
    assert result.rank(0)["metrics"]["count"] == result.rank(1)["metrics"]["count"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_gradients_by_hand(tmp_path):
    result = run(tmp_path / "run", by_hand="manual_backward")
    assert result.code == 0, result.stderr
    for name, value in single_process().state_dict().items():
        torch.testing.assert_close(result.rank(1)["state"][name], value, rtol=1e-5, atol=1e-6)
    result = run(tmp_path / "raw", by_hand="raw")
    assert result.code != 0
    assert "call self.manual_backward(loss) instead of loss.backward()" in result.stderr


def test_a_trainer_of_one_process_after_one_of_two_is_refused(tmp_path):
    result = run(tmp_path / "run", after="one_device")
    assert result.code != 0
    assert "one of several that an earlier Trainer of this script started" in result.stderr


def test_one_rank_alone_asks_to_stop(tmp_path):
    result = run(tmp_path / "run", misdeed="stop_alone", slow=True, trainer={"max_epochs": 60})
    assert result.code == 0, result.stderr
    assert result.rank(0)["steps"] == result.rank(1)["steps"] < 180


def test_a_rank_with_a_batch_more_is_an_error_on_all(tmp_path):
    result = run(tmp_path / "run", loader="one_more")
    assert result.code != 0
    assert "rank 0: 6, rank 1: 7" in result.stderr
    assert_nothing_left(tmp_path / "run")


def test_a_batch_that_one_rank_alone_skips_is_an_error_on_all(tmp_path):
    """It would be averaged with the next one of the other rank, and with max_steps nothing would ever hang."""
    skipped_by_all = run(tmp_path / "both", skips={"1": [0, 1]}, trainer={"max_epochs": 1})
    assert skipped_by_all.code == 0, skipped_by_all.stderr
    assert [skipped_by_all.rank(rank)["steps"] for rank in range(2)] == [2, 2]
    result = run(tmp_path / "one", skips={"1": [1]}, collective_timeout=6, trainer={"max_steps": 2})
    assert result.code != 0
    assert "batch 1, for which training_step returned None" in result.stderr
    assert_nothing_left(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_loaders_without_length_end_together(tmp_path):
    result = run(tmp_path / "run", loader="unsized", trainer={"max_epochs": 2})
    assert result.code == 0, result.stderr
    assert result.rank(0)["steps"] == result.rank(1)["steps"] == 10


@pytest.mark.slow
def test_a_log_that_only_rank_zero_synchronises_ends_in_an_error(tmp_path):
    result = run(tmp_path / "run", misdeed="log_on_rank_zero", collective_timeout=8)
    assert result.code != 0
    assert_nothing_left(tmp_path / "run")


def test_an_unused_parameter_is_explained(tmp_path):
    result = run(tmp_path / "run", unused=True)
    assert result.code != 0
    assert "ddp_find_unused_parameters_true" in result.stderr
    result = run(tmp_path / "run2", unused=True, trainer={"strategy": "ddp_find_unused_parameters_true"})
    assert result.code == 0, result.stderr


def test_a_parameter_that_one_rank_leaves_out_is_found_in_that_step(tmp_path):
    """Not in the next one: another collective may come before, and there may be no next one."""
    result = run(tmp_path / "run", unused="on_rank_1", trainer={"max_epochs": 1, "limit_train_batches": 1})
    assert result.code == 1
    assert "'extra.weight', 'extra.bias' were not used by training_step on rank 1" in result.stderr
    assert_nothing_left(tmp_path / "run")


def test_an_error_after_the_fit_is_no_success(tmp_path):
    result = run(tmp_path / "run", after="raise")
    assert result.code != 0
    assert "after the fit" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_a_checkpoint_may_be_saved_after_the_run(tmp_path):
    result = run(tmp_path / "run", evaluate=True, save_after=str(tmp_path / "after.ckpt"))
    assert result.code == 0, result.stderr
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert saved["global_step"] == 9
    assert len(saved["ranks"]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_another_number_of_processes_continues(tmp_path):
    run(tmp_path / "run", evaluate=True, trainer={"max_epochs": 2}, save_after=str(tmp_path / "two.ckpt"))
    result = run(
        tmp_path / "one",
        ckpt_path=str(tmp_path / "two.ckpt"),
        batch_size=16,
        trainer={"max_epochs": 3, "devices": 1, "strategy": "auto"},
    )
    assert result.code == 0, result.stderr
    expected = single_process().state_dict()
    for name, value in result.rank(0)["state"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("built", ["configure_model", "setup"])
def test_layers_built_in_hooks_come_back_from_workers_or_say_why(tmp_path, built):
    result = run(tmp_path / "run", built=built, trainer={"strategy": "ddp_spawn", "enable_checkpointing": True})
    if built == "configure_model":
        assert result.code == 0, result.stderr
        state, expected = result.rank(0)["state"], single_process().state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    else:
        assert result.code != 0
        assert "The trained weights are in" in result.stderr


class Buffered(Module):
    """With tensors of many kinds, some of them tied and some in no state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(3, 3)
        self.tied = torch.nn.Linear(3, 3)
        self.tied.weight = self.layer.weight
        self.wave = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(3), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.average += self.layer.bias.detach() / 3
        return (self.tied(self.layer(batch)) * self.wave.abs()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "32-true"])
@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_the_module_comes_back_from_workers_as_they_had_it(tmp_path, strategy, precision):
    def fit(strategy, devices):
        model = Buffered()
        trainer = Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, precision=precision, max_epochs=1, logger=False,
            callbacks=[ModelCheckpoint(tmp_path, strategy)], enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        dtype = {"64": torch.float64, "bf": torch.bfloat16, "32": torch.float32}[precision[:2]]
        trainer.fit(model, torch.utils.data.DataLoader(rows(16).to(dtype), 4))
        return model

    def dtypes(model):
        return {name: each.dtype for name, each in (*model.named_parameters(), *model.named_buffers())}

    model = fit(strategy, 2)
    assert dtypes(model) == dtypes(fit("single_device", 1)) and model.tied.weight is model.layer.weight
    saved = torch.load(tmp_path / f"{strategy}.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


# -- in the ranks of one world -----------------------------------------------------------------------------------


class Thawed(Module):
    """Its first layer is frozen until the second epoch."""

    def __init__(self, optimizer="adam"):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.layers[0].requires_grad_(False)
        self.optimizer = optimizer
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return (self.layers(batch) - batch.sum(1, keepdim=True)).pow(2).mean()

    def on_train_epoch_start(self):
        self.layers[0].requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self):
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.05)
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=8, line_search_fn="strong_wolfe")


def rows(count):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(9))


def fit_in_ranks(optimizer):
    model = Thawed(optimizer)
    loader = torch.utils.data.DataLoader(rows(32), 4, shuffle=False)
    trainer = Trainer(
        accelerator=hardware.name(), devices=2, strategy="ddp", max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}, model.calls


def test_what_is_unfrozen_while_training_is_averaged(world2):
    (mine, _), (theirs, _) = world2.run(fit_in_ranks, "adam")
    model = Thawed()
    optimizer = model.configure_optimizers()
    for epoch in range(3):
        model.layers[0].requires_grad_(epoch > 0)
        for batch in rows(32).reshape(4, 4, 2, 3).transpose(1, 2).reshape(4, 8, 3):  # rank r has every second row
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            optimizer.step()
    for name, expected in model.state_dict().items():
        assert torch.equal(mine[name], theirs[name]), name
        torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6, msg=name)


class Changing(Thawed):
    """Layers are frozen and unfrozen in the midst of an epoch: ``plan`` says at which batch of all, and where."""

    PLANS = {
        "unfrozen between two batches": ("hook", [0], {3: (0, True)}),
        "unfrozen in a step": ("step", [0], {3: (0, True)}),
        "unfrozen in the first epoch, all": ("hook", [0, 2], {3: (0, True), 5: (2, True)}),
        "all unfrozen in a step": ("step", [0, 2], {3: (0, True), 5: (2, True)}),
        "frozen between two batches": ("hook", [], {3: (2, False), 5: (0, False), 6: (2, True)}),
    }

    def __init__(self, plan):
        super().__init__()
        self.where, frozen, self.plan = self.PLANS[plan]
        for index, layer in enumerate(self.layers):
            layer.requires_grad_(index not in frozen)

    def change(self):
        if self.calls in self.plan:
            index, trained = self.plan[self.calls]
            self.layers[index].requires_grad_(trained)

    def on_train_batch_start(self, batch, batch_idx):
        if self.where == "hook":
            self.change()

    def on_train_epoch_start(self):
        pass

    def training_step(self, batch, batch_idx):
        if self.where == "step":
            self.change()
        loss = super().training_step(batch, batch_idx)
        return loss if loss.requires_grad else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_changing(strategy, plans):
    found = []
    for plan in plans:
        for accumulate in (1, 4):
            model = Changing(plan)
            loader = torch.utils.data.DataLoader(rows(64), 4, shuffle=False)
            trainer = Trainer(
                accelerator=hardware.name(), devices=2, strategy=strategy, max_epochs=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                accumulate_grad_batches=accumulate,
            )  # fmt: skip
            trainer.fit(model, loader)
            found.append({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    return found


def changed_alone(plan, accumulate):
    model = Changing(plan)
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(rows(64).reshape(8, 4, 2, 3).transpose(1, 2).reshape(8, 8, 3)):
        model.on_train_batch_start(batch, index)
        loss = model.training_step(batch, index)
        if loss is not None:
            (loss / accumulate).backward()
        if index % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true", "zero1"])
def test_what_is_frozen_or_unfrozen_within_an_epoch_is_averaged(world2, strategy):
    if strategy == "zero1":
        pytest.importorskip("torchhal_parallel")
    found = zip(*world2.run(fit_changing, strategy, list(Changing.PLANS)), strict=True)
    for (plan, accumulate), (mine, theirs) in zip(itertools.product(Changing.PLANS, (1, 4)), found, strict=True):
        for name, expected in changed_alone(plan, accumulate).items():
            what = f"{name}, {plan}, {accumulate}"
            torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6, msg=what)
            assert torch.equal(mine[name], theirs[name]), what


class ByTurns(Thawed):
    """Two halves of which each step trains one, as a GAN's are."""

    def on_train_epoch_start(self):
        self.wrappers = set()

    def on_train_batch_start(self, batch, batch_idx):
        for index, layer in ((0, self.layers[0]), (1, self.layers[2])):
            layer.requires_grad_(batch_idx % 2 == index)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.wrappers.add(id(self.trainer.strategy.model))


def count_wrappers_by_turns():
    model = ByTurns()
    Trainer(
        accelerator=hardware.name(), devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    return len(model.wrappers)


def test_halves_that_are_trained_by_turns_keep_a_wrapper_that_allows_unused_parameters(world2):
    assert world2.run(count_wrappers_by_turns) == [1, 1]


class FrozenForGood(Thawed):
    """Its first layer is trained in the first epoch only."""

    def on_train_epoch_start(self):
        self.layers[0].requires_grad_(self.current_epoch == 0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.sent = self.trainer.strategy.comm_state.pop()


def send(sent, bucket):
    sent[-1:] = [sum(sent[-1:]) + bucket.buffer().numel()]
    return default_hooks.allreduce_hook(None, bucket)


def fit_frozen_for_good():
    class Sent(Callback):
        def on_train_epoch_end(self, trainer, module):
            by_epoch.append(module.sent)

    by_epoch, model = [], FrozenForGood()
    Trainer(
        accelerator=hardware.name(), devices=2, max_epochs=3, logger=False, callbacks=[Sent()],
        strategy=DDPStrategy(find_unused_parameters=True, comm_hook=send, comm_state=[]),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    first = sum(parameter.numel() for parameter in model.layers[0].parameters())
    return by_epoch, first


def test_what_an_epoch_did_not_train_is_no_longer_sent(world2):
    for (first, second, third), frozen in world2.run(fit_frozen_for_good):
        assert first == second == third + frozen


class GrowsAndFreezes(Thawed):
    """Gets a new last layer, of each rank's own random numbers, in the midst of an epoch, when it freezes the first."""

    def on_train_epoch_start(self):
        self.layers[0].requires_grad_(True)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            torch.manual_seed(self.trainer.global_rank)
            self.layers[0].requires_grad_(False)
            self.layers[2] = torch.nn.Linear(self.layers[2].in_features, self.layers[2].out_features)


def fit_growing():
    model = GrowsAndFreezes()
    Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, strategy="ddp",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    return model.layers[2].weight.detach().clone()


def test_a_layer_that_grew_as_another_was_frozen_is_the_same_on_every_rank(world2):
    mine, theirs = world2.run(fit_growing)
    assert torch.equal(mine, theirs)


class FrozenTooLate(Thawed):
    """What its step freezes, the averaging waits for."""

    def training_step(self, batch, batch_idx):
        self.layers[2].weight.requires_grad_(batch_idx < 2)
        return super().training_step(batch, batch_idx)


class UnfrozenApart(Thawed):
    """Each rank unfreezes another part of a layer."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            (self.layers[0].weight if self.trainer.global_rank else self.layers[0].bias).requires_grad_(True)


class UnfrozenOnOneRank(Thawed):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank:
            self.layers[0].bias.requires_grad_(True)


def fail_on_one_rank():
    with pytest.raises(DistributedError) as caught:
        Trainer(
            accelerator=hardware.name(), devices=2, strategy=DDPStrategy(timeout=timedelta(seconds=5)), max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(UnfrozenOnOneRank(), torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    return str(caught.value)


@pytest.mark.slow
def test_what_one_rank_alone_has_unfrozen_is_named(world2):
    _, text = world2.run(fail_on_one_rank, timeout=60)
    assert "comparison of what is trained, as 'layers.0.bias' was unfrozen" in text, text


def fail_to_fit(kind):
    with pytest.raises((ModelError, DistributedError)) as caught:
        Trainer(
            accelerator=hardware.name(), devices=2, strategy="ddp", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(globals()[kind](), torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("FrozenTooLate", "'layers.2.weight' of FrozenTooLate were frozen while a step ran"),
        ("UnfrozenApart", "where rank 0 has .*'layers.0.weight', .*False.*, rank 1 has .*'layers.0.weight', .*True"),
    ],
)
def test_what_the_ranks_cannot_average_is_refused_in_the_step(world2, kind, words):
    for text in world2.run(fail_to_fit, kind):
        assert re.search(words, text), text


class ByHand(Thawed):
    def __init__(self, averaged):
        super().__init__()
        self.automatic_optimization = False
        self.averaged = averaged

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss) if self.averaged else loss.backward()
        optimizer.step()


def fit_by_hand_twice():
    trainer = Trainer(
        accelerator=hardware.name(), devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(rows(32), 4)
    trainer.fit(ByHand(averaged=True), loader)
    trainer.fit_loop.max_epochs, model = 2, ByHand(averaged=False)
    with pytest.raises((ModelError, DistributedError), match=r"call self\.manual_backward\(loss\) instead"):
        trainer.fit(model, loader)
    return model.calls


def test_each_fit_that_steps_by_hand_has_to_average(world2):
    assert world2.run(fit_by_hand_twice) == [1, 1]


def test_a_line_search_takes_the_same_way_on_every_rank(world2):
    """Each rank's own loss would let one evaluate once more than the other, which waits for it in the averaging."""
    (mine, calls), (theirs, others) = world2.run(fit_in_ranks, "lbfgs")
    assert calls == others > 12
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


class ThawedOnce(Thawed):
    """Its first layer is trained from the second epoch on, which only the start of that epoch says."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(True)


def resume_thawed(folder, strategy):
    """Whether a run that goes on in the third epoch ends as the one that it continues, with the same layers trained."""
    found = []
    for ckpt_path in (None, f"{folder}/batch9.ckpt"):
        model = ThawedOnce()
        trainer = Trainer(
            accelerator=hardware.name(), devices=2, strategy=strategy, max_epochs=3, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[SaveAt(folder, [9])], accumulate_grad_batches=2,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(rows(32), 4, shuffle=True), ckpt_path=ckpt_path)
        found.append((model.state_dict(), [each.requires_grad for each in model.parameters()]))
    (whole, trained), (state, trained_then) = found
    return trained_then == trained, all(torch.equal(whole[name], state[name]) for name in whole)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_resumed_run_trains_what_was_unfrozen(world2, tmp_path, strategy):
    for same_trained, same_weights in world2.run(resume_thawed, str(tmp_path), strategy):
        assert same_trained and same_weights


class Wide(Module):
    """Gradients of many sizes: with three ranks or more, each place in a buffer has its own order of summation."""

    def __init__(self, frozen):
        super().__init__()
        torch.manual_seed(3)
        sizes = [(8, 60), (60, 61), (61, 30), (30, 1)]
        layers = [layer for size in sizes for layer in (torch.nn.Linear(*size), torch.nn.Tanh())]
        self.layers = torch.nn.Sequential(*layers[:-1])
        self.frozen = frozen

    def on_train_epoch_start(self):
        if self.frozen:
            self.layers[0].requires_grad_(self.current_epoch > 0)

    def training_step(self, batch, batch_idx):
        return (self.layers(batch) - batch.sum(1, keepdim=True)).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class SaveAt(Callback):
    """Writes a checkpoint after some of the batches, and in the middle of each validation."""

    def __init__(self, folder, batches):
        self.folder, self.batches = folder, batches

    def on_train_batch_end(self, trainer, *args):
        if trainer.fit_loop.total_batches in self.batches:
            trainer.save_checkpoint(f"{self.folder}/batch{trainer.fit_loop.total_batches}.ckpt")

    def on_validation_epoch_end(self, trainer, module):
        if trainer.fit_loop.total_batches and not trainer.sanity_checking:
            trainer.save_checkpoint(f"{self.folder}/validation{trainer.fit_loop.total_batches}.ckpt")


def fit_wide(callbacks=(), ckpt_path=None, frozen=False, strategy=None, **options):
    model = Wide(frozen)
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(9))
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
    trainer = Trainer(
        **{"accelerator": hardware.name(), "devices": "auto", "max_epochs": 2, **options}, callbacks=list(callbacks),
        strategy=strategy or "ddp", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader, torch.utils.data.DataLoader(data[:24], 4), ckpt_path=ckpt_path)
    return trainer, {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}


def hooked():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return DDPStrategy(comm_hook=allreduce_hook, bucket_cap_mb=0.01, gradient_as_bucket_view=True)


def resume_everywhere(folder, frozen, with_hook):
    """Which of the places where a run was saved give other weights at its end, if it goes on from there."""
    options = {"frozen": frozen}
    make = hooked if with_hook else lambda: None
    _, whole = fit_wide(**options, strategy=make())
    _, saved = fit_wide([SaveAt(folder, [1, 2, 5, 9, 11])], **options, strategy=make())
    trainer, _ = fit_wide(max_steps=4, **options, strategy=make())
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.strategy.barrier()
    differ = [] if all(torch.equal(whole[name], saved[name]) for name in whole) else ["saving"]
    for path in sorted(Path(folder).glob("*.ckpt")):
        trainer, state = fit_wide(ckpt_path=path, **options, strategy=make())
        if not all(torch.equal(whole[name], state[name]) for name in whole):
            differ.append(path.name)
    return differ, len(list(Path(folder).glob("*.ckpt")))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(("frozen", "with_hook"), [(False, False), (True, False), (False, True)])
def test_a_resumed_run_adds_gradients_up_in_the_order_of_the_unbroken_one(request, tmp_path, size, frozen, with_hook):
    """DistributedDataParallel chooses its buckets anew after its first iteration."""
    world = request.getfixturevalue(f"world{size}")
    for differ, places in world.run(resume_everywhere, str(tmp_path), frozen, with_hook, timeout=90):
        assert places == 8 and differ == []


def resume_without(name, folder):
    """What a fit warns of on a torch without ``name``, its weights, and those of one that goes on from its middle."""
    owner, _, attribute = name.rpartition(".")
    owner = {"": DistributedDataParallel, "reducer": dist.Reducer}[owner]
    ddp_buckets._warn_once.cache_clear()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as noted:
        patch.delattr(owner, attribute)
        warnings.simplefilter("always")
        _, whole = fit_wide([SaveAt(folder, [2, 5, 9])], max_epochs=1)
        _, resumed = fit_wide(ckpt_path=f"{folder}/batch5.ckpt", max_epochs=1)
    return [str(warning.message) for warning in noted if attribute in str(warning.message)], whole, resumed


@pytest.mark.parametrize("name", ["_get_ddp_logging_data", "reducer._push_all_rebuilt_params"])
def test_a_torch_without_the_names_of_buckets_saves_and_resumes_without_their_order(world2, tmp_path, name):
    """Two ranks add up the same in any order."""
    (said, whole, resumed), (other, _, _) = world2.run(resume_without, name, str(tmp_path))
    assert len(said) == 1 and f"DistributedDataParallel.{name}, by which" in said[0] and other == []
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), key
    assert "ddp_bucket_order" not in torch.load(tmp_path / "batch9.ckpt", weights_only=True)["strategy"]


@pytest.fixture
def wrapper():
    """A wrapper of two layers in a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ddp_buckets._NAMES)
def test_without_any_of_its_names_a_bucket_order_is_left_alone(wrapper, monkeypatch, name):
    wrapper(torch.ones(1, 2)).sum().backward()
    order = ddp_buckets.read_bucket_order(wrapper)
    assert sorted(order) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    path, _, attribute = name.rpartition(".")
    owner = getattr(wrapper, path) if path else wrapper
    monkeypatch.delattr(owner if attribute in getattr(owner, "__dict__", ()) else type(owner), attribute)
    ddp_buckets._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=name) as noted:
        assert ddp_buckets.read_bucket_order(wrapper) is None
        assert ddp_buckets.set_bucket_order(wrapper, order) is False
    assert len(noted) == 1


def save_in_accumulations(folder):
    _, whole = fit_wide(accumulate_grad_batches=2)
    _, saved = fit_wide([SaveAt(folder, [1, 3, 5])], accumulate_grad_batches=2)
    _, resumed = fit_wide(accumulate_grad_batches=2, ckpt_path=f"{folder}/batch5.ckpt")
    return whole, saved, resumed


def test_a_save_in_the_midst_of_an_accumulation_changes_nothing(world2, tmp_path):
    for whole, saved, resumed in world2.run(save_in_accumulations, str(tmp_path)):
        for name, tensor in whole.items():
            assert torch.equal(saved[name], tensor), name
            torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-6)


class Apart(Thawed):
    """Each rank changes a weight by itself, in the forward of its last step say."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.layers[2].weight.add_(self.by * self.trainer.global_rank)


class Hooked(DDPStrategy):
    """As a plugin adds a hook, which may average now and then only."""

    def configure_ddp(self):
        super().configure_ddp()
        self.model.register_comm_hook(None, default_hooks.allreduce_hook)


class Local(ParallelStrategy):
    """Each rank trains by itself, until somebody averages the weights."""


class Alike(Local):
    compares_replicas = True


def fit_apart(by, strategy="ddp", ignored=()):
    """What fit says, and what it warns of."""
    makers = {
        "ddp": DDPStrategy, "hook": lambda: DDPStrategy(comm_hook=default_hooks.allreduce_hook), "hooked": Hooked,
        "local": Local, "alike": Alike,
    }  # fmt: skip
    trainer = Trainer(
        accelerator=hardware.name(), devices=2, strategy=makers[strategy](), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Apart(by)
    model._ddp_params_and_buffers_to_ignore = list(ignored)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, torch.utils.data.DataLoader(rows(8), 4))
        except DistributedError as error:
            return str(error), []
    return "", [str(warning.message) for warning in noted if "norm" in str(warning.message)]


def test_replicas_that_came_apart_are_found_when_the_fit_ends(world2):
    for said, _ in world2.run(fit_apart, 0.01):
        assert "'layers.2.weight'" in said and "ranks 0, 1" in said and "of the norm" in said
    assert world2.run(fit_apart, 0.0) == [("", [])] * 2


def test_replicas_round_differently_with_a_warning(world2):
    (said, warned), other = world2.run(fit_apart, 1e-7)
    assert not said and "rounded differently" in warned[0] and other == ("", [])


@pytest.mark.parametrize("strategy", ["hook", "hooked", "local"])
def test_replicas_that_may_differ_by_design_are_not_compared(world2, strategy):
    assert world2.run(fit_apart, 0.01, strategy) == [("", [])] * 2


def test_a_strategy_declares_that_its_replicas_are_alike(world2):
    for said, _ in world2.run(fit_apart, 0.01, "alike"):
        assert "differ between ranks 0, 1" in said


def test_parameters_that_ddp_ignores_are_not_compared(world2):
    assert world2.run(fit_apart, 0.01, "ddp", ["layers.2.weight"]) == [("", [])] * 2


def differences(cases):
    """What is found of weights of each dtype, that far apart, and the warnings."""
    found = []
    with joined(), warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for name, by in cases:
            weight = torch.arange(1, 65).to(getattr(torch, name))
            weight[:32] += int(os.environ["RANK"]) * by
            found.append(bool(find_difference([("w", None, weight)])))
    return found, len(noted)


def test_the_dtype_decides_what_is_rounding(world2):
    rounded = [("float64", 1e-9), ("float32", 1e-4), ("complex64", 1e-4), ("bfloat16", 0.25), ("float16", 0.05)]
    apart = [("float64", 1e-4), ("float32", 0.1), ("bfloat16", 4.0), ("float16", 2.0), ("int64", 1), ("uint8", 1)]
    (found, warned), (same, other) = world2.run(differences, rounded + apart)
    assert found == same == [False] * 5 + [True] * 6 and (warned, other) == (5, 0)


def what_is_sent(apart):
    """What a rank sends of twenty parameters of which each rank has other parts, and all have one whole."""
    sent = []

    def gather(value, **options):
        sent.append(value)
        return all_gather_object(value, **options)

    all_gather_object = collectives.all_gather_object
    me = int(os.environ["RANK"])
    with joined(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather_object", gather)
        whole = ("whole", None, torch.ones(3) + me * apart)
        difference = find_difference([*((f"part{index}", (me,), torch.full((2,), me)) for index in range(20)), whole])
    return difference, [len(pickle.dumps(value)) for value in sent], ["part" in repr(value) for value in sent]


def test_ranks_send_digests_and_names_of_what_differs_alone(world2):
    for difference, sizes, names in world2.run(what_is_sent, 0.0):
        assert not difference and len(sizes) == 2 and sizes[0] < 40 and sizes[1] < 21 * 30 and not any(names)
    for difference, sizes, names in world2.run(what_is_sent, 1.0):
        assert "'whole' differ between ranks 0, 1" in difference and len(sizes) == 3 and not any(names)


class Bounded(Module):
    def __init__(self, **options):
        super().__init__()
        self.table = torch.nn.EmbeddingBag(6, 3, **options)

    def training_step(self, batch, batch_idx):
        return self.table(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_bounded(devices, **options):
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Bounded(**options), torch.utils.data.DataLoader(torch.arange(12).reshape(4, 3) % 6, 2))
    except ModelError as error:
        return str(error)


def fit_both():
    return fit_bounded(2, max_norm=2.0), fit_bounded(2, scale_grad_by_freq=True)


def test_a_layer_that_writes_to_its_weight_or_counts_by_the_batch_is_refused(world2):
    for said, frequent in world2.run(fit_both):
        assert "'table' is an EmbeddingBag with max_norm=2.0" in said and "2 replicas" in said and "renorm_" in said
        assert "'table' is an EmbeddingBag with scale_grad_by_freq=True" in frequent and "2 replicas" in frequent
