"""Runs with Colossal-AI are those of ddp: what is averaged, stepped, saved and refused."""

import colossalai_training as training
import pytest
import torch

pytestmark = [pytest.mark.usefixtures("colossalai"), pytest.mark.timeout(240)]

ZERO = ("zero1", "zero2")
ALL = ("colossalai", *ZERO)


def same(results, reference, tolerance=0.0):
    for rank, (result, other) in enumerate(zip(results, reference, strict=True)):
        for name, value in other["state"].items():
            if rank and name in ("mean", "body.2.running_mean", "body.2.running_var"):
                continue  # a buffer: rank 0's in the end, where ddp leaves each rank its own
            assert torch.allclose(result["state"][name], value, rtol=tolerance, atol=tolerance), name
        assert result["losses"] == pytest.approx(other["losses"], rel=tolerance or 1e-12)


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize(
    "model",
    [
        "Manual", "Toggled", "ManualClosure", "OwnStep", "Shapes", "Scheduled", "Replaced", "Running", "BySign",
        "ByASGD", "ByRprop",
    ],
)  # fmt: skip
def test_equals_ddp(world2, strategy, model):
    # stage 2 adds up averages of two backward passes by hand, where others average sums
    tolerance = 1e-6 if (strategy, model) == ("zero2", "Manual") else 0.0
    same(world2.run(training.train, strategy, model), world2.run(training.train, "ddp", model), tolerance)


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
    ],
    ids=["accumulation-with-a-short-one", "clipped-by-norm", "clipped-by-value", "bf16-mixed", "64-true"],
)
def test_equals_ddp_with(world2, strategy, options):
    same(
        world2.run(training.train, strategy, "LossesInFloat", options),
        world2.run(training.train, "ddp", "LossesInFloat", options),
    )


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize(("precision", "tolerance"), [("16-mixed", 0.0), ("16-true", 1e-3), ("bf16-true", 1e-2)])
def test_half_precisions(world2, strategy, precision, tolerance):
    options = {"precision": precision, "gradient_clip_val": 0.5}
    results = world2.run(training.train, strategy, "InHalfPrecision", options)
    same(results, world2.run(training.train, "ddp", "InHalfPrecision", options), tolerance)
    assert torch.equal(results[0]["state"]["body.0.weight"], results[1]["state"]["body.0.weight"])


@pytest.mark.parametrize("strategy", ZERO)
def test_messages_in_many_buckets(world2, strategy):
    same(world2.run(training.train, f"{strategy}_small", "Shapes"), world2.run(training.train, "ddp", "Shapes"))


@pytest.mark.parametrize("strategy", ALL)
def test_three_ranks_equal_ddp(world3, strategy):
    options = {"devices": 3, "batch": 2, "gradient_clip_val": 0.3}
    same(
        world3.run(training.train, strategy, "Shapes", options),
        world3.run(training.train, "ddp", "Shapes", options),
        1e-5,
    )


@pytest.mark.parametrize("strategy", ALL)
def test_freezing(world2, strategy):
    options = {"max_epochs": 4}
    same(
        world2.run(training.train, strategy, "Alternating", options),
        world2.run(training.train, "ddp", "Alternating", options),
    )
    same(
        world2.run(training.train, f"{strategy}_unused", "FrozenInTheMiddle"),
        world2.run(training.train, "ddp_unused", "FrozenInTheMiddle"),
    )


@pytest.mark.parametrize("strategy", ALL)
def test_a_group_that_comes_later(world2, strategy):
    same(world2.run(training.train, strategy, "GroupAdded"), world2.run(training.train, "ddp", "GroupAdded"))


@pytest.mark.parametrize("strategy", ALL)
def test_unused_parameters_are_refused_by_name(world2, strategy):
    for told in world2.run(training.error_of, strategy, "Unused"):
        assert told.startswith("DistributedError") and "'idle.weight'" in told and "find_unused_parameters=True" in told


@pytest.mark.parametrize("strategy", ALL)
def test_unused_parameters_that_are_allowed(world2, strategy):
    results = world2.run(training.train, f"{strategy}_unused", "Unused")
    same(results, world2.run(training.train, "ddp_unused", "Unused"))


@pytest.mark.parametrize("strategy", ALL)
def test_synchronized_batch_norms(world2, strategy):
    options = {"sync_batchnorm": True}
    same(
        world2.run(training.train, strategy, "Convolution", options),
        world2.run(training.train, "ddp", "Convolution", options),
    )


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Sparse", "'rows' has sparse=True"),
        ("Complex", "'phases' of Complex is complex"),
        ("TwoDtypes", "'body.0.weight' of TwoDtypes is torch.float32 and 'wide' is torch.float64"),
        ("TwoOwners", "two optimizers of TwoOwners have 'body.0.bias'"),
        ("Views", "are views of the same memory"),
        ("ByNorm", "NormedSGD looks at all elements of a parameter together"),
        ("ByAdafactor", "Adafactor looks at all elements of a parameter together"),
        ("ByLBFGS", "LBFGS evaluates the model within a step"),
    ],
)
def test_what_cannot_be_divided_is_refused(world2, strategy, model, told):
    for error in world2.run(training.error_of, strategy, model):
        assert told in error and "use strategy='ddp'" in error, error


def test_clipping_by_the_model_is_refused_where_it_has_no_gradients(world2):
    same(world2.run(training.train, "zero1", "ClipsItself"), world2.run(training.train, "ddp", "ClipsItself"))
    for error in world2.run(training.error_of, "zero2", "ClipsItself"):
        assert "ClipsItself.configure_gradient_clipping would never see a gradient" in error


@pytest.mark.parametrize("strategy", ZERO)
def test_ranks_that_step_by_other_numbers_are_refused(world2, strategy):
    for error in world2.run(training.error_of, strategy, "LrOfTheRank"):
        assert error.startswith("DistributedError") and "0.01 on rank 0 and 0.02 on rank 1" in error


@pytest.mark.parametrize("strategy", ZERO)
def test_a_layer_frozen_on_one_rank_is_an_error_everywhere(world2, strategy):
    assert all(world2.run(training.frozen_on_one_rank, strategy, timeout=100))


@pytest.mark.parametrize("strategy", ZERO)
def test_callbacks_see_whole_parameters_and_norms(world2, strategy):
    seen, reference = (world2.run(training.watched, each)[0] for each in (strategy, "ddp"))
    assert all(whole for whole, *_ in seen)
    assert [all_there for _, all_there, _, _ in seen] == [strategy == "zero1"] * len(seen)
    assert not any(some for _, _, some, _ in seen) or strategy == "zero1"  # stage 2 has them in parts
    assert [norm for *_, norm in seen] == [norm for *_, norm in reference]


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [(one, other) for one in ALL for other in ("ddp", one)] + [("ddp", one) for one in ALL] + [("zero1", "zero2")],
)
@pytest.mark.parametrize("model", ["Perceptron", "Shapes"])
def test_resumes_under_another_strategy(world2, tmp_path, saved_by, resumed_by, model):
    saved = world2.run(training.save, saved_by, str(tmp_path), model)
    resumed = world2.run(training.resume, resumed_by, saved[0][1], model)
    for (trained, _), result in zip(saved, resumed, strict=True):
        assert result["losses"] == trained["losses"][-len(result["losses"]) :]
        assert all(torch.equal(result["state"][name], value) for name, value in trained["state"].items())


@pytest.mark.parametrize("strategy", ZERO)
def test_resumes_on_another_number_of_ranks(world2, world3, tmp_path, strategy):
    """With as many samples in a step; the whole run under ddp is the reference."""
    saved = world2.run(training.save, strategy, str(tmp_path))
    resumed = world3.run(training.resume, strategy, saved[0][1], "Perceptron", {"devices": 3})
    reference = world3.run(training.resume, "ddp", saved[0][1], "Perceptron", {"devices": 3})
    same(resumed, reference, 1e-6)
    alone = training.resume("single_device", saved[0][1], "Perceptron", {"devices": 1})
    assert alone["losses"]


@pytest.mark.parametrize("strategy", ZERO)
def test_a_checkpoint_after_the_fit_is_that_of_its_end(world2, tmp_path, strategy):
    for within, after, shapes, padding in world2.run(training.saved_twice, strategy, str(tmp_path)):
        assert torch.equal(within[0]["state"][0]["exp_avg"], after[0]["state"][0]["exp_avg"])
        assert within[0]["state"].keys() == after[0]["state"].keys() == set(range(6))
        assert shapes <= {(32, 64), (32, 32), (4, 32), (32,), (4,)}
        assert padding == 0


@pytest.mark.parametrize("strategy", ALL)
def test_the_boosters_files_have_what_a_checkpoint_has(world2, tmp_path, strategy):
    state, optimizer = world2.run(training.save_by_booster, strategy, str(tmp_path))[0]
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in state.items())
    if strategy != "colossalai":
        saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"]
        assert all(torch.equal(saved[0][name], value) for name, value in optimizer[0].items())


@pytest.mark.parametrize("strategy", ZERO)
def test_after_a_failure_the_optimizers_state_is_refused(world2, tmp_path, strategy):
    for error in world2.run(training.saved_after_a_failure, strategy, str(tmp_path / "after.ckpt")):
        assert error.startswith("CheckpointError") and "parts of the state of Adam were with other ranks" in error


@pytest.mark.parametrize("strategy", ALL)
def test_a_checkpoint_in_the_middle_of_an_accumulation(world2, tmp_path, strategy):
    path = str(tmp_path / "middle.ckpt")
    whole = world2.run(training.save_in_accumulation, strategy, path)
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    resumed = world2.run(training.resume, strategy, path, "Perceptron", options)
    under_ddp = world2.run(training.resume, "ddp", path, "Perceptron", options)
    for trained, *others in zip(whole, resumed, under_ddp, strict=True):
        for result in others:
            same([{**result, "losses": []}], [{**trained, "losses": []}], 1e-6)


# -- life cycle ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ALL)
def test_a_module_trained_before_and_a_second_fit(world2, strategy):
    same(world2.run(training.again, strategy), world2.run(training.again, "ddp"))


@pytest.mark.parametrize("strategy", ALL)
def test_evaluates_without_a_fit(world2, strategy):
    results, reference = (world2.run(training.evaluate_without_a_fit, each) for each in (strategy, "ddp"))
    for (losses, predicted), (others, expected) in zip(results, reference, strict=True):
        assert losses == others and torch.equal(predicted, expected)


@pytest.mark.parametrize("strategy", ALL)
def test_one_batch_more_is_an_error_everywhere(world2, strategy):
    told = world2.run(training.one_batch_more, strategy, timeout=100)
    assert all(told), told


@pytest.mark.parametrize("strategy", ALL)
def test_a_run_leaves_nothing_behind(world2, strategy):
    for first, second, kinds, attributes, hooks, same_again in world2.run(training.left_behind, strategy):
        assert not first and not second
        assert "BatchNorm2d" in kinds and "SyncBatchNorm" not in kinds
        assert not attributes and not hooks
        assert same_again
