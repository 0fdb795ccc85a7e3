"""Every strategy against the plain single-process loop: 12 optimizer steps, clipped, of two batches each."""

import functools

import models
import pytest
import torch
import training
import wrong
from parity import CONV, TRANSFORMER, check, label, plain, world
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from torchhal import Trainer
from torchhal.errors import UnsupportedCombinationError

pytestmark = pytest.mark.timeout(170)

CASES = [
    *(
        (alias, size, model, None)
        for alias in ("zero1", "zero2", "zero3", "tensor_parallel", "pipeline")
        for size in (2, 4)
        for model in (TRANSFORMER, CONV)
    ),
    ("fsdp", 2, TRANSFORMER, {"wrap_policy": "none", "activation_checkpointing": "blocks"}),
    ("fsdp", 2, TRANSFORMER, {"wrap_policy": 1000, "cpu_offload": True}),
    ("hybrid", 2, TRANSFORMER, {"pipeline": 2, "schedule": "gpipe", "microbatches": 8}),
    ("hybrid", 2, TRANSFORMER, {"pipeline": 2, "schedule": "interleaved_1f1b"}),
    ("hybrid", 2, TRANSFORMER, {"data": 2}),
    ("hybrid", 4, TRANSFORMER, {"data": 2, "tensor": 2}),
    ("hybrid", 4, CONV, {"shard": 2, "pipeline": 2, "reshard_after_forward": False}),
    ("hybrid", 4, TRANSFORMER, {"shard": 2, "tensor": 2, "cpu_offload": True}),
    ("hybrid", 4, TRANSFORMER, {"pipeline": 2, "tensor": 2, "activation_checkpointing": "blocks"}),
    ("hybrid", 4, TRANSFORMER, {"data": 2, "shard": 2, "activation_checkpointing": "blocks", "wrap_policy": 1000}),
    ("hybrid", 8, TRANSFORMER, {"data": 2, "tensor": 2, "pipeline": 2}),
    ("hybrid", 8, CONV, {"data": 2, "tensor": 2, "pipeline": 2}),
    ("hybrid", 8, TRANSFORMER, {"shard": 2, "tensor": 2, "pipeline": 2}),
]


# of each alias the fast tier has one case
FIRST = {alias: case for case in reversed(CASES) for alias in case[:1]}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in FIRST.values() else pytest.mark.slow) for case in CASES], ids=label
)
def test_parity(request, case):
    alias, size, model, arguments = case
    check(world(request, size).run(training.train, alias, size, model, arguments, timeout=150), model)


SYNC_BATCHNORM = [
    ("zero1", 2, "BatchNormNet", None),
    ("zero2", 2, "BatchNormNet", None),
    ("zero3", 2, "BatchNormNet", None),
    ("zero3", 4, "BatchNormNet", None),
    ("hybrid", 2, "BatchNormNet", {"data": 2}),
    ("hybrid", 4, "BatchNormNet", {"data": 2, "shard": 2}),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case[:2] == ("zero3", 2) else pytest.mark.slow) for case in SYNC_BATCHNORM],
    ids=label,
)
def test_batch_norms_see_the_whole_batch_where_asked_to(request, case):
    _, size, model, _ = case
    check(world(request, size).run(training.train_synced, *case, timeout=150), model)


def test_sync_batchnorm_refused_in_pipeline():
    """Batch norms are refused where no rank sees its whole batch."""
    for strategy, devices in (("pipeline", 2), ("dp", 2), ("ddp2", 2)):
        with pytest.raises(UnsupportedCombinationError, match="sync_batchnorm=True"):
            Trainer(accelerator="cpu", strategy=strategy, devices=devices, sync_batchnorm=True)


SCALED = [
    ("zero1", 2, CONV, None),
    ("zero1", 2, TRANSFORMER, None),
    ("zero2", 2, TRANSFORMER, None),
    ("zero3", 2, TRANSFORMER, None),
    ("hybrid", 2, CONV, {"data": 2}),
    ("hybrid", 4, TRANSFORMER, {"data": 2, "shard": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SCALED, ids=label)
def test_16_mixed(request, case):
    _, size, model, _ = case
    results = world(request, size).run(training.train_in, "16-mixed", *case, timeout=150)
    check(results, model, torch.float16, tolerance=5e-3)


PRECISIONS = {
    "bf16-mixed": (torch.bfloat16, 5e-3, False),
    "64-true": (torch.float64, 1e-11, True),
    "bf16-true": (torch.bfloat16, 2e-2, True),
}
IN_PRECISION = [
    *((alias, 2, TRANSFORMER, None) for alias in ("zero1", "zero2", "zero3", "tensor_parallel", "pipeline")),
    ("hybrid", 4, TRANSFORMER, {"shard": 2, "tensor": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_PRECISION, ids=label)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions(request, precision, case):
    dtype, tolerance, true = PRECISIONS[precision]
    results = world(request, case[1]).run(training.train_in, precision, *case, timeout=150)
    check(results, TRANSFORMER, dtype, tolerance, true)


@pytest.mark.parametrize("alias, axes", [("fsdp", {}), ("hybrid", {"shard": 2})])
def test_a_policy_of_the_units(world2, alias, axes):
    """bfloat16 in the units alone: the weights are close to those of the plain loop, and not the same."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    arguments = {**axes, "mixed_precision": policy}
    result = world2.run(training.train, alias, 2, TRANSFORMER, arguments, timeout=100)[0]
    apart = [(result["state"][name] - value).abs().mean() for name, value in plain(TRANSFORMER)[1].items()]
    assert 1e-6 < max(apart) < 5e-3
    assert {value.dtype for value in result["state"].values()} == {torch.float32}


@pytest.mark.slow
def test_a_rank_holds_its_share(world2, world4):
    """Bytes per rank between steps, as multiples of the whole model's."""
    whole = sum(p.numel() for p in models.Transformer().parameters()) * 4
    expected = {
        ("zero1", 2): (1.0, 0.5), ("zero2", 2): (0.5, 0.5), ("zero3", 2): (0.5, 0.5), ("zero3", 4): (0.25, 0.25),
        ("zero1", 4): (1.0, 0.25),
    }  # fmt: skip
    for (alias, size), (parameters, optimizer) in expected.items():
        results = (world2 if size == 2 else world4).run(training.train, alias, size, TRANSFORMER, timeout=100)
        for result in results:
            assert result["bytes"]["parameters"] / whole == pytest.approx(parameters, rel=0.1)
            assert result["bytes"]["optimizer"] / (2 * whole) == pytest.approx(optimizer, rel=0.15)


ODD = ["zero1", "zero2", "zero3", "tensor_parallel", "pipeline", "hybrid"]


@pytest.mark.slow
@pytest.mark.parametrize("alias", ODD)
def test_an_accumulation_that_the_end_cuts_short(world2, alias):
    """23 batches, two to a step: the last step is made of one."""
    arguments = {"hybrid": {"data": 2}}.get(alias)
    expected = training.cut_short("single_device", 1, TRANSFORMER)["state"]
    for result in world2.run(training.cut_short, alias, 2, TRANSFORMER, arguments, timeout=100)[:1]:
        assert result["step"] == 12
        for name, value in expected.items():
            torch.testing.assert_close(result["state"][name], value, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["zero1", "zero2", "zero3", "tensor_parallel", "hybrid"])
def test_optimizing_by_hand(world2, alias):
    arguments = {"hybrid": {"shard": 2}}.get(alias)
    expected = training.by_hand("single_device", 1)
    for state in world2.run(training.by_hand, alias, 2, arguments, timeout=100):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=2e-4, atol=2e-4)


@functools.lru_cache
def plain_adversarial():
    module = wrong.Generative()
    optimizers = module.configure_optimizers()
    samples = training.adversarial_samples()
    for batch in DataLoader(samples, 4):
        for loss, optimizer in zip(module.losses(batch), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return float(sum(module.losses(samples[:9]))), module.state_dict()


@pytest.mark.parametrize("alias", ["zero2", "zero3"])
def test_two_networks_against_each_other(world2, alias):
    value, state = plain_adversarial()
    for found, ours in world2.run(training.adversarial, alias, 2, timeout=100):
        assert found == pytest.approx(value, abs=1e-5)
        for name, expected in state.items():
            torch.testing.assert_close(ours[name], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("alias", ["tensor_parallel", "pipeline"])
def test_ranks_of_one_batch_see_the_same_samples(world2, alias):
    """Shuffled over three epochs, with random numbers drawn in one stage: the loss still falls as on one device."""
    expected = training.shuffled("single_device", 1)
    for losses, leader in world2.run(training.shuffled, alias, 2, timeout=100):
        if leader:
            assert losses == pytest.approx(expected[0], rel=2e-3)


@pytest.mark.parametrize("alias", ["zero1", "zero3", "tensor_parallel"])
def test_marks_on_parameters_survive(world2, alias):
    """What users tell their parameters apart by, in configure_optimizers and after the run."""
    for during, after in world2.run(training.marked, alias, 2, timeout=60):
        assert during == after == ["head.bias"]


@pytest.mark.parametrize("alias", ["zero2", "zero3", "hybrid"])
def test_buffers_and_parameters_kept_whole_are_those_of_ddp(world2, alias):
    ddp, sharded = (world2.run(training.normed, name, 2, timeout=100) for name in ("ddp", alias))
    for (value, state), (other, also) in zip(ddp, sharded, strict=True):
        assert other == pytest.approx(value, abs=1e-5)
        for name in state:
            torch.testing.assert_close(also[name], state[name], rtol=1e-4, atol=1e-5)


def test_a_run_that_failed_says_what_it_left(world2):
    for first, second in world2.run(training.fail_then_fit, "zero3", 2, timeout=60):
        assert "on purpose" in first
        assert "in parts" in second and "checkpoint" in second
