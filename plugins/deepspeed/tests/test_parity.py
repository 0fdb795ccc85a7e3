"""Every stage is ddp with its state elsewhere: the same numbers, to the bit where sums have the same order."""

import engine_training as training
import pytest
import torch

pytestmark = pytest.mark.timeout(300)

ALIASES = [
    "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
]  # fmt: skip


@pytest.fixture(scope="module")
def ddp(world2):
    """Losses, weights and optimizer state of ddp on the same batches."""
    return world2.run(training.train, "ddp", 2, timeout=200)


def same(results, reference, compare=torch.equal):
    for rank, (result, other) in enumerate(zip(results, reference, strict=True)):
        for name, value in other["state"].items():
            if rank == 0 or "running" not in name:  # a batch norm's statistics are rank 0's
                assert compare(result["state"][name], value), name
    for index, entry in reference[0]["optimizer"]["state"].items():
        for key, value in entry.items():
            assert compare(results[0]["optimizer"]["state"][index][key], value), (index, key)
    for result, other in zip(results, reference, strict=True):
        assert result["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert result["rates"] == other["rates"]
        assert result["step"] == other["step"]


def close(tolerance):
    return lambda a, b: torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("alias", ALIASES)
def test_equal_to_ddp_to_the_bit(world2, ddp, alias):
    results = world2.run(training.train, alias, 2, timeout=200)
    same(results, ddp)
    assert results[0]["losses"] == ddp[0]["losses"]


def test_offload_to_nvme(world2, ddp, tmp_path):
    """Where async_io has been built before: with libaio it takes minutes."""
    if not training.async_io_is_built():
        pytest.skip("DeepSpeed's operator async_io is not built here")
    offloads = {"stage": 3, "nvme_path": str(tmp_path), "param_persistence_threshold": 0, "offload_optimizer": "nvme"}
    small = {"device": "nvme", "buffer_size": 100_000}
    for strategy in (offloads, {**offloads, "offload_parameters": small}):
        folder = str(tmp_path / f"{len(strategy)}")
        same(world2.run(training.write, strategy, 2, folder, timeout=200), ddp)
        path = f"{folder}/epoch=0-step=4.ckpt"
        results = world2.run(training.resume, strategy, 2, path, timeout=200)
        assert results[0]["losses"] == ddp[0]["losses"][4:]
    assert not [path for path in (tmp_path / "zero_stage_3").rglob("*") if path.is_file()]


def test_accumulation_and_clipping_are_the_engines_and_end_with_the_epoch(world2):
    reference = world2.run(training.accumulated, "ddp", 2, timeout=200)
    assert reference[0]["step"] == 6  # 11 batches in steps of 4, twice
    for alias in ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_2_offload"):
        same(world2.run(training.accumulated, alias, 2, timeout=200), reference, close(3e-5))


def test_nothing_is_clipped_unless_asked_for(world2):
    """DeepSpeed's own default clips at 1.0, and the gradients of the first batches are longer."""
    results = world2.run(training.gradient_norms, timeout=200)
    assert results[0]["norm"] > 1.0
    assert results[0]["update"] == pytest.approx(results[0]["norm"], rel=1e-5)


def test_bf16_keeps_fp32_weights_in_the_optimizer(world2, ddp):
    results = world2.run(training.mixed, training.BF16, 2, "bf16-mixed", timeout=200)
    assert results[0]["computed_in"] == "torch.bfloat16"
    assert all(value.dtype is torch.float32 for value in results[0]["state"].values() if value.is_floating_point())
    assert results[0]["losses"] == pytest.approx(ddp[0]["losses"], rel=0.03)
    assert results[0]["losses"] != ddp[0]["losses"]
    same(world2.run(training.declared, training.BF16, 2, timeout=200), results)


def test_fp16_scales_the_loss_or_says_why_not(world2, ddp):
    """Whether DeepSpeed has float16 on a CPU depends on the processor."""
    strategy = {"stage": 2, "config": {"data_types": {"buffer_dtype": "fp16"}}}
    outcomes = world2.outcomes(training.mixed, strategy, 2, "16-mixed", timeout=200)
    if outcomes[0].error:
        assert {outcome.error for outcome in outcomes} == {"UnsupportedCombinationError"}
        assert "float16" in outcomes[0].message and "bf16-mixed" in outcomes[0].message
    else:
        assert outcomes[0].value["computed_in"] == "torch.float16"
        assert outcomes[0].value["losses"] == pytest.approx(ddp[0]["losses"], rel=0.03)


def test_stage_0_and_optimizers_of_any_kind(world2):
    for strategy, model in (
        ({"stage": 0}, "Net"),
        ("deepspeed_stage_2", "Momentum"),
        ("deepspeed_stage_3", "Momentum"),
    ):
        reference = world2.run(training.train, "ddp", 2, model, timeout=200)
        same(world2.run(training.train, strategy, 2, model, timeout=200), reference)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_of_any_shape_and_order_in_memory(world2, stage):
    reference = world2.run(training.shaped, "ddp", timeout=200)
    results = world2.run(training.shaped, {"stage": stage}, timeout=200)
    same(results, reference, close(1e-6))
    assert results[0]["order"] == reference[0]["order"] == (36, 1, 12, 4)


def test_the_engines_optimizer_and_scheduler(world2):
    """Both from the configuration; the engine steps the scheduler, once per step."""
    results = world2.run(training.train, training.OWN, 2, "EnginesOwn", timeout=200)
    reference = world2.run(training.train, "ddp", 2, "LikeEnginesOwn", timeout=200)
    same(results, reference)
    assert results[0]["rates"][:4] == pytest.approx([0.0, 0.0005, 0.001, 0.0015])


def test_a_model_of_configure_model_is_built_in_parts(world2, ddp):
    results = world2.run(training.train, training.SHARP, 2, "Late", timeout=200)
    assert results[0]["losses"] == ddp[0]["losses"]
    whole = sum(parameter.numel() for parameter in training.Net().parameters())
    assert results[0]["built"] == pytest.approx(whole / 2, rel=0.05)  # after configure_model, on a rank
    assert world2.run(training.linear_is_torchs) == [True, True]  # zero.Init replaces it


def test_a_model_that_was_built_in_parts_goes_on_in_the_next_run(world2):
    reference = world2.run(training.one_after_the_other, "ddp", "Once", timeout=200)
    assert world2.run(training.one_after_the_other, training.SHARP, "Once", timeout=200) == reference


def test_state_is_divided(world2):
    held = {}
    for alias in ("deepspeed_stage_1", "deepspeed_stage_3"):
        held[alias] = world2.run(training.train, alias, 2, timeout=200)
    whole = sum(p.numel() for p in training.Net().parameters() if p.requires_grad)
    for results in held.values():
        assert [result["held"] for result in results] == pytest.approx([whole / 2] * 2, rel=0.02)
    everything = sum(p.numel() for p in training.Net().parameters())
    assert held["deepspeed_stage_3"][0]["partitioned"] == pytest.approx(everything / 2, rel=0.02)


@pytest.mark.parametrize("alias", ["deepspeed_stage_2", "deepspeed_stage_3"])
def test_validate_and_predict(world2, alias):
    reference = world2.run(training.everything, "ddp", 2, timeout=200)
    for mine, other in zip(world2.run(training.everything, alias, 2, timeout=200), reference, strict=True):
        assert mine[0] == pytest.approx(other[0], rel=1e-6)
        assert mine[1] == pytest.approx(other[1], rel=1e-6)
        torch.testing.assert_close(mine[2], other[2])
        assert mine[3] == pytest.approx(other[3], rel=1e-6)


@pytest.mark.parametrize("model", ["Layered", "Borrowed"])
def test_an_evaluation_of_which_a_rank_has_less(world2, model):
    """Nothing stays gathered between two uses of a parameter, as in a large model: every forward communicates."""
    released = {"stage": 3, "param_persistence_threshold": 0, "max_reuse_distance": 0}
    reference = world2.run(training.unequal, "ddp", model, timeout=200)
    assert [counts for *_, counts in reference] == [[0, 1, 2, 3] * 4, [0, 1, 2] * 4]
    for strategy in ("deepspeed_stage_3", released):
        assert world2.run(training.unequal, strategy, model, timeout=200) == reference


def test_activations_may_be_recomputed(world2, ddp):
    results = world2.run(training.recomputed, timeout=200)
    for result in results:
        assert result["losses"] == ddp[0]["losses"] or result["losses"] == ddp[1]["losses"]
        assert result["calls"] == 2 * result["plain_calls"]


def test_a_model_that_optimizes_by_hand(world2):
    reference = world2.run(training.by_hand, "ddp", 2, timeout=200)
    for alias in ("deepspeed_stage_2", "deepspeed_stage_3"):
        for mine, other in zip(world2.run(training.by_hand, alias, 2, timeout=200), reference, strict=True):
            for name, value in other.items():
                torch.testing.assert_close(mine[name], value, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_readmes_table_for_the_lower_stages(world2, ddp, stage):
    recomputing = {"stage": stage, "activation_checkpointing": torch.nn.Linear}
    same(world2.run(training.train, recomputing, 2, timeout=200), ddp)
    if stage == 1:
        same(world2.run(training.train, {"stage": 1, "offload_optimizer": "cpu"}, 2, timeout=200), ddp)
    if stage:
        results = world2.run(training.mixed, {**training.BF16, "stage": stage}, 2, "bf16-mixed", timeout=200)
        assert results[0]["computed_in"] == "torch.bfloat16"
        assert results[0]["losses"] == pytest.approx(ddp[0]["losses"], rel=0.03)
