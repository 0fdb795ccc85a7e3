"""ddp through the Trainer, in real processes: the numbers of one process, and every way to fail."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import hardware
import pytest
import torch
from limits import scaled
from tiers import slow
from torch import nn
from torch.nn import functional as F

from torchhal import Module, Trainer

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
    deadline = time.monotonic() + 5
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


def test_a_line_search_takes_the_same_way_on_every_rank(world2):
    """Each rank's own loss would let one evaluate once more than the other, which waits for it in the averaging."""
    (mine, calls), (theirs, others) = world2.run(fit_in_ranks, "lbfgs")
    assert calls == others > 12
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
