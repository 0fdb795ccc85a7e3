"""Horovod's runs are those of ddp: what is averaged, saved, refused, and left behind."""

import horovod_training as training
import pytest
import torch

pytestmark = [pytest.mark.usefixtures("horovod"), pytest.mark.timeout(240)]


def same(results, reference, tolerance=0.0):
    for result, other in zip(results, reference, strict=True):
        for name, value in other["state"].items():
            assert torch.allclose(result["state"][name], value, rtol=tolerance, atol=tolerance), name
        assert result["losses"] == pytest.approx(other["losses"], rel=tolerance or 1e-12)


@pytest.mark.parametrize(
    ("model", "accumulate"),
    [("Manual", 1), ("ManyKinds", 1), ("ManyKinds", 4), ("FrozenInTheMiddle", 1), ("FrozenInTheMiddle", 4)],
)
def test_equals_ddp(world2, model, accumulate):
    options = {"accumulate_grad_batches": accumulate}  # of six batches: the last step has fewer
    same(
        world2.run(training.train, "horovod", model, options),
        world2.run(training.train, "ddp_unused" if model == "FrozenInTheMiddle" else "ddp", model, options),
        1e-6 if model == "ManyKinds" else 0.0,
    )


def test_three_ranks_equal_ddp(world3):
    options = {"devices": 3, "batch": 2}
    same(
        world3.run(training.train, "horovod", "Perceptron", options),
        world3.run(training.train, "ddp", "Perceptron", options),
        1e-6,
    )


def test_freezing_from_epoch_to_epoch(world2):
    options = {"max_epochs": 4}
    same(
        world2.run(training.train, "horovod", "Alternating", options),
        world2.run(training.train, "ddp", "Alternating", options),
    )


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_precisions(world2, precision):
    options = {"precision": precision}
    same(
        world2.run(training.train, "horovod", "HalfPrecision", options),
        world2.run(training.train, "ddp", "HalfPrecision", options),
        1e-2 if precision == "bf16-true" else 1e-6,
    )


def test_compression_rounds_and_no_more(world2):
    exact = world2.run(training.train, "horovod", "Perceptron")
    rounded = world2.run(training.train, "fp16", "Perceptron")
    assert rounded[0]["losses"] != exact[0]["losses"]
    same(rounded, exact, 1e-2)
    assert all(torch.equal(rounded[0]["state"][key], value) for key, value in rounded[1]["state"].items())


def test_unused_parameters_are_refused_by_name(world2):
    for told in world2.run(training.refused_unused):
        assert told.startswith("DistributedError") and "'idle.weight'" in told and "find_unused_parameters=True" in told


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_unused_parameters_that_are_allowed(world2, accumulate):
    options = {"accumulate_grad_batches": accumulate}
    results = world2.run(training.train, "unused", "Unused", options)
    same(results, world2.run(training.train, "ddp_unused", "Unused", options))
    untouched = training.Unused().state_dict()["idle.weight"]
    assert torch.equal(results[0]["state"]["idle.weight"], untouched)  # weight decay has nothing to act on
    assert not torch.equal(results[0]["state"]["seldom.weight"], training.Unused().state_dict()["seldom.weight"])


@pytest.mark.parametrize(("saved_by", "resumed_by"), [("horovod", "horovod"), ("horovod", "ddp"), ("ddp", "horovod")])
def test_resumes_under_another_strategy(world2, tmp_path, saved_by, resumed_by):
    saved = world2.run(training.save, saved_by, str(tmp_path))
    resumed = world2.run(training.resume, resumed_by, saved[0][1])
    for (trained, _), result in zip(saved, resumed, strict=True):
        assert result["losses"] == trained["losses"][-len(result["losses"]) :]
        assert all(torch.equal(result["state"][name], value) for name, value in trained["state"].items())


def test_one_batch_more_is_an_error_everywhere(world2):
    told = world2.run(training.one_batch_more, "horovod", timeout=60)
    assert all(told), told


def test_the_error_of_one_rank_reaches_the_other(world2):
    waiting, failed = world2.run(training.error_of_one_rank, timeout=60)
    assert failed == "ValueError: the cause"
    assert waiting.startswith("RankFailedError") and "the cause" in waiting


def test_a_run_leaves_nothing_behind(world2):
    for same_variables, initialised, threads, same_again in world2.run(training.environment_afterwards):
        assert same_variables and not initialised and not threads and same_again


def test_horovod_initialised_for_another_world_is_refused(world2):
    for told in world2.run(training.initialised_before):
        assert told.startswith("ConfigurationError") and "leave hvd.init() to the strategy" in told


def test_horovods_broadcast_of_optimizer_state_is_broken_which_is_why_it_is_not_used(world2):
    """It steps a fresh Adam to make it state, which then counts a step that never was."""
    assert world2.run(training.broadcast_trap)[0] == [1.0, 1.0]
