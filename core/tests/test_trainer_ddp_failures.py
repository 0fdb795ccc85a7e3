"""Test that ddp jobs end on all ranks, with a reason: errors, signals, unequal ranks, unused parameters."""

import re

import pytest
import torch
from limits import scaled
from tiers import slow
from training_script import assert_nothing_left, run

pytestmark = pytest.mark.slow_on_sim


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"optimizer": {"lr": 0.2}}, r"the same optimizers \(rank 0 has \['SGD\(.*lr=0.1.*rank 1 has \['SGD\(.*lr=0.2"),
        ({"trainer": {"gradient_clip_val": 0.1}}, r"the same gradient_clip_val \(rank 0 has None, rank 1 has 0.1\)"),
        ({"trainer": {"accumulate_grad_batches": 2}}, r"accumulate_grad_batches \(rank 0 has 1, rank 1 has 2\)"),
    ],
)
def test_ranks_with_different_settings_refused(tmp_path, differs, said):
    """Their gradients are the same, and their weights would part without a word."""
    result = run(tmp_path / "run", of_rank_1=differs)
    assert result.code == 1
    assert re.search(said, result.stderr), result.stderr


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
def test_signal_stops_ranks_with_checkpoint(tmp_path, misdeed, code, workers):
    """A signal ends all ranks at one step with a checkpoint."""
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
def test_signal_in_synchronised_validation(tmp_path):
    """A signal inside a validation that communicates leaves a checkpoint."""
    out = tmp_path / "run"
    config = {"val_sync": True, "val": 24, "trainer": {"max_epochs": 4, "enable_checkpointing": True}}
    stopped = run(out, misdeed="sigterm", where="validation", at=3, **config)
    assert stopped.code == 143, stopped.stderr
    assert list((out / "ckpt").glob("*.ckpt"))


def test_one_rank_alone_asks_to_stop(tmp_path):
    result = run(tmp_path / "run", misdeed="stop_alone", slow=True, trainer={"max_epochs": 60})
    assert result.code == 0, result.stderr
    assert result.rank(0)["steps"] == result.rank(1)["steps"] < 180


def test_uneven_batches_fail_all_ranks(tmp_path):
    """A rank with one batch more is an error on all ranks."""
    result = run(tmp_path / "run", loader="one_more")
    assert result.code != 0
    assert "rank 0: 6, rank 1: 7" in result.stderr
    assert_nothing_left(tmp_path / "run")


def test_batch_skipped_by_one_rank(tmp_path):
    """It would be averaged with the next one of the other rank, and with max_steps nothing would ever hang."""
    skipped_by_all = run(tmp_path / "both", skips={"1": [0, 1]}, trainer={"max_epochs": 1})
    assert skipped_by_all.code == 0, skipped_by_all.stderr
    assert [skipped_by_all.rank(rank)["steps"] for rank in range(2)] == [2, 2]
    result = run(tmp_path / "one", skips={"1": [1]}, collective_timeout=6, trainer={"max_steps": 2})
    assert result.code != 0
    assert "batch 1, for which training_step returned None" in result.stderr
    assert_nothing_left(tmp_path / "one")


@pytest.mark.slow
def test_log_synchronised_on_rank_0_only(tmp_path):
    """A log that only rank 0 synchronises ends in an error."""
    result = run(tmp_path / "run", misdeed="log_on_rank_zero", collective_timeout=8)
    assert result.code != 0
    assert_nothing_left(tmp_path / "run")


def test_an_unused_parameter_is_explained(tmp_path):
    result = run(tmp_path / "run", unused=True)
    assert result.code != 0
    assert "ddp_find_unused_parameters_true" in result.stderr
    result = run(tmp_path / "run2", unused=True, trainer={"strategy": "ddp_find_unused_parameters_true"})
    assert result.code == 0, result.stderr


def test_parameter_unused_on_one_rank(tmp_path):
    """Not in the next one: another collective may come before, and there may be no next one."""
    result = run(tmp_path / "run", unused="on_rank_1", trainer={"max_epochs": 1, "limit_train_batches": 1})
    assert result.code == 1
    assert "'extra.weight', 'extra.bias' were not used by training_step on rank 1" in result.stderr
    assert_nothing_left(tmp_path / "run")


def test_error_after_fit(tmp_path):
    """An error after the fit is no success."""
    result = run(tmp_path / "run", after="raise")
    assert result.code != 0
    assert "after the fit" in result.stderr
