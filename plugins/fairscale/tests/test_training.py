"""The runs of fairscale_oss and fairscale_sdp are those of ddp: what is averaged, saved, refused, and left behind."""

import fairscale_training as training
import pytest
import torch

pytestmark = [pytest.mark.usefixtures("fairscale"), pytest.mark.timeout(240)]

BOTH = pytest.mark.parametrize("strategy", ["oss", "sdp"])


def same(results, reference, tolerance=0.0):
    for result, other in zip(results, reference, strict=True):
        for name, value in other["state"].items():
            if "running" in name and other is not reference[0]:
                continue  # of batch norms, those of rank 0 count
            assert torch.allclose(result["state"][name], value, rtol=tolerance, atol=tolerance), name
        assert result["losses"] == pytest.approx(other["losses"], rel=tolerance or 1e-12)


@BOTH
@pytest.mark.parametrize(
    "model", ["Manual", "TwoGroups", "ManyKinds", "OwnStep", "GroupAdded", "Normed", "ReplacedMemory", "Attention"]
)
def test_equals_ddp(world2, strategy, model):
    same(world2.run(training.train, strategy, model), world2.run(training.train, "ddp", model))


@pytest.mark.parametrize(
    ("strategy", "model"),
    [("oss", "OwnClipping"), ("oss", "HookOfTheStep"), ("oss", "HookByHand"), ("sdp", "HookByHand")],
)
def test_clipping_of_the_models_own_equals_ddp(world2, strategy, model):
    """Where all ranks have all gradients; see ``test_refused_by_name``."""
    same(world2.run(training.train, strategy, model), world2.run(training.train, "ddp", model))


@BOTH
def test_toggled_optimizers_equal_ddp(world2, strategy):
    same(world2.run(training.train, strategy, "Toggled"), world2.run(training.train, "ddp", "Toggled"))


@BOTH
@pytest.mark.parametrize("model", ["Alternating", "FrozenInTheMiddle", "AllFrozenAtTimes"])
def test_freezing_equals_ddp(world2, strategy, model):
    options = {"max_epochs": 4}
    same(
        world2.run(training.train, strategy, model, options),
        world2.run(training.train, "ddp", model, options),
    )


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4},  # of six batches: the last step has two
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"sync_batchnorm": True},
    ],
    ids="-".join,
)
def test_options_equal_ddp(world2, strategy, options):
    model = "Normed" if "sync_batchnorm" in options else "Perceptron"
    same(world2.run(training.train, strategy, model, options), world2.run(training.train, "ddp", model, options))


@BOTH
@pytest.mark.parametrize("clip", [None, 0.05])
def test_norm_of_the_gradients_is_that_of_all_ranks(world2, strategy, clip):
    options = {"gradient_clip_val": clip}
    found, expected = world2.run(training.norms, strategy, options), world2.run(training.norms, "ddp", options)
    same(found, expected)
    assert [one["norms"] for one in found] == [one["norms"] for one in expected]


@BOTH
def test_three_ranks_equal_ddp(world3, strategy):
    options = {"devices": 3, "batch": 2}
    same(
        world3.run(training.train, strategy, "Perceptron", options),
        world3.run(training.train, "ddp", "Perceptron", options),
        1e-6,
    )


@BOTH
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(world2, strategy, precision):
    options = {"precision": precision}
    same(
        world2.run(training.train, strategy, "Perceptron", options),
        world2.run(training.train, "ddp", "Perceptron", options),
    )


def test_loss_scaling_under_oss_equals_ddp(world2):
    options = {"precision": "16-mixed"}
    same(
        world2.run(training.train, "oss", "Perceptron", options),
        world2.run(training.train, "ddp", "Perceptron", options),
    )


def test_loss_scaling_under_sdp_is_refused(world2):
    for told in world2.run(training.error_of, "sdp", "Perceptron", {"precision": "16-mixed"}):
        assert told.startswith("UnsupportedCombinationError") and "loss_scaling" in told, told


def test_sparse_gradients_under_oss_equal_ddp(world2):
    same(world2.run(training.train, "oss", "Sparse"), world2.run(training.train, "ddp", "Sparse"))


@pytest.mark.parametrize(
    ("strategy", "model", "kind", "said"),
    [
        ("sdp", "Sparse", "ModelError", "use strategy='fairscale_oss'"),
        ("sdp", "TwiceCheckpointed", "DistributedError", "got a second gradient in one backward"),
        ("oss", "OwnLBFGS", "ConfigurationError", "use strategy='ddp'"),
        ("sdp", "OwnLBFGS", "ConfigurationError", "use strategy='ddp'"),
        ("oss", "Coupled", "ConfigurationError", "looks at all of them together"),
        ("sdp", "Views", "ModelError", "views of the same memory"),
        ("oss", "FullySharded", "ConfigurationError", "Use strategy='fsdp' or 'zero3'"),
        ("sdp", "OwnRate", "DistributedError", "is 0.01 on rank 0 and 0.011 on rank 1"),
        ("oss", "OwnNoise", "DistributedError", "before step 1 of its optimizer"),
        ("sdp", "OwnNoise", "DistributedError", "before step 1 of its optimizer"),
        ("sdp", "OtherOrder", "DistributedError", "in another order"),
        ("sdp", "OwnClipping", "ModelError", "OwnClipping.configure_gradient_clipping would see a share"),
        ("sdp", "HookOfTheStep", "ModelError", "Adam has a hook before its step"),
        ("sdp", "HookOfALaterStep", "ModelError", "Adam has a hook before its step"),
        ("oss", "Ignoring", "ModelError", "each rank is to train 'body.0.weight' of Ignoring by itself"),
        ("sdp", "Ignoring", "ModelError", "each rank is to train 'body.0.weight' of Ignoring by itself"),
        ("sdp", "OtherOwners", "DistributedError", "in another order"),
        ("sdp", "OtherOrderLater", "DistributedError", "in another order"),
    ],
)
def test_refused_by_name(world2, strategy, model, kind, said):
    for told in world2.run(training.error_of, strategy, model):
        # of ranks that wait for each other, one may be told that the other has given up
        assert told.startswith((kind, f"RankFailedError: rank {told[22:23]} failed: {kind}")) and said in told, told


@BOTH
def test_unused_parameters_are_refused_by_name(world2, strategy):
    told = world2.run(training.error_of, strategy, "Unused")
    assert any("'idle.weight'" in one and "find_unused_parameters=True" in one for one in told), told


@BOTH
def test_unused_parameters_that_are_allowed(world2, strategy):
    results = world2.run(training.train, f"{strategy}_unused", "Unused")
    same(results, world2.run(training.train, "ddp_unused", "Unused"))
    assert not torch.equal(results[0]["state"]["seldom.weight"], training.Unused().state_dict()["seldom.weight"])


def test_another_order_that_is_allowed(world2):
    same(world2.run(training.train, "sdp_unused", "OtherOrder"), world2.run(training.train, "ddp", "OtherOrder"), 1e-6)


def test_a_layer_that_is_checkpointed_twice(world2):
    same(
        world2.run(training.train, "sdp_unused", "TwiceCheckpointed"), world2.run(training.train, "ddp", "Twice"), 1e-6
    )


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [("oss", "oss"), ("oss", "ddp"), ("ddp", "oss"), ("sdp", "sdp"), ("sdp", "ddp"), ("ddp", "sdp"), ("oss", "sdp")],
)
def test_resumes_under_another_strategy(world2, tmp_path, saved_by, resumed_by):
    saved = world2.run(training.save, saved_by, str(tmp_path))
    resumed = world2.run(training.resume, resumed_by, saved[0][1][0])
    for (trained, _), result in zip(saved, resumed, strict=True):
        assert result["losses"] == trained["losses"][-len(result["losses"]) :]
        assert all(torch.equal(result["state"][name], value) for name, value in trained["state"].items())


@pytest.mark.parametrize("resumed_by", ["oss", "sdp", "ddp"])
@BOTH
def test_each_rank_saves_its_share_into_a_sharded_checkpoint(world2, tmp_path, strategy, resumed_by):
    pytest.importorskip("torchhal_parallel")
    saved = world2.run(training.save, strategy, str(tmp_path), 2, "dcp")
    resumed = world2.run(training.resume, resumed_by, saved[0][1][0], 2, "dcp")
    for (trained, _), result in zip(saved, resumed, strict=True):
        assert result["losses"] == trained["losses"][-len(result["losses"]) :]


@BOTH
def test_checkpoints_are_those_of_ddp(world2, tmp_path, strategy):
    files = []
    for name in (strategy, "ddp"):
        (tmp_path / name).mkdir()
        saved = world2.run(training.save, name, str(tmp_path / name))
        files.append(torch.load(saved[0][1][0], weights_only=True))
    for mine, other in zip(*(file["optimizer_states"] for file in files), strict=True):
        assert mine["param_groups"] == other["param_groups"]
        assert list(mine["state"]) == list(other["state"])
        for index, entry in other["state"].items():
            assert all(
                torch.equal(mine["state"][index][key], value) for key, value in entry.items() if value is not None
            )


@BOTH
def test_resumes_with_another_number_of_ranks(world2, world3, tmp_path, strategy):
    saved = world3.run(training.save, strategy, str(tmp_path), 3)
    resumed = world2.run(training.resume, strategy, saved[0][1][0])
    same(resumed, world2.run(training.resume, "ddp", saved[0][1][0]))


@BOTH
def test_one_batch_more_is_an_error_everywhere(world2, strategy):
    told = world2.run(training.one_batch_more, strategy, timeout=60)
    assert all(told), told


@BOTH
def test_the_error_of_one_rank_reaches_the_other(world2, strategy):
    waiting, failed = world2.run(training.error_of_one_rank, strategy, timeout=60)
    assert failed == "ValueError: the cause"
    assert waiting.startswith("RankFailedError") and "the cause" in waiting


@BOTH
def test_one_object_runs_several_times(world2, strategy):
    for mine, other in zip(
        world2.run(training.runs_of_one_object, strategy), world2.run(training.runs_of_one_object, "ddp"), strict=True
    ):
        assert mine == other


@pytest.mark.parametrize("strategy", ["oss", "sdp", "oss_checkpointed", "sdp_checkpointed"])
def test_a_run_leaves_nothing_on_the_model(world2, strategy):
    for left in world2.run(training.left_behind, strategy):
        assert left == {
            "own memory": True,
            "hooks": False,
            "forwards": [],
            "handlers of the root logger": [],
            "same optimizer": True,
        }


def test_state_and_gradients_are_divided(world2):
    (gradients0, state0), (gradients1, state1) = world2.run(training.share_of_state, "sdp")
    assert state0 + state1 == gradients0 + gradients1 == 6
    assert [gradients for gradients, _ in world2.run(training.share_of_state, "oss")] == [6, 6]
