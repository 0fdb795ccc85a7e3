"""Test ddp through the Trainer, in real processes, against one process on the joined batches."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training_script import SCRIPT, assert_nothing_left, run, single_process

pytestmark = pytest.mark.slow_on_sim


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_equals_one_process_on_joined_batch(tmp_path, strategy, accelerator):
    """Training on two ranks equals one process on the joined batches."""
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


def test_single_process_after_ddp_refused(tmp_path):
    """A Trainer of one process after one of two processes is refused."""
    result = run(tmp_path / "run", after="one_device")
    assert result.code != 0
    assert "one of several that an earlier Trainer of this script started" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_loaders_without_length_end_together(tmp_path):
    result = run(tmp_path / "run", loader="unsized", trainer={"max_epochs": 2})
    assert result.code == 0, result.stderr
    assert result.rank(0)["steps"] == result.rank(1)["steps"] == 10


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_save_checkpoint_after_run(tmp_path):
    """A checkpoint may be saved after the run."""
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
def test_hook_built_layers_return_from_workers(tmp_path, built):
    """Layers built in configure_model come back from workers; an error says why others can't."""
    result = run(tmp_path / "run", built=built, trainer={"strategy": "ddp_spawn", "enable_checkpointing": True})
    if built == "configure_model":
        assert result.code == 0, result.stderr
        state, expected = result.rank(0)["state"], single_process().state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    else:
        assert result.code != 0
        assert "The trained weights are in" in result.stderr


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "32-true"])
@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_module_returns_from_workers(tmp_path, strategy, precision):
    """The module comes back from workers as they had it."""
    command = [sys.executable, str(SCRIPT.with_name("returned_module.py")), str(tmp_path), strategy, precision]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
