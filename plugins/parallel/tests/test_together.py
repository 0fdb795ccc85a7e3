"""Code over all parameters or all samples of a pipeline: right, or refused by name before the first optimizer step."""

import io
import operator

import pytest
import staged
import together
import torch
from tiers import slow
from torch import nn

from torchhal.accelerators import CPUAccelerator
from torchhal.errors import ConfigurationError, ModelError
from torchhal.strategies.sharded_optimizers import check_separable
from torchhal_parallel._remote_tensor import RemoteWriteError, remote, remote_gradient
from torchhal_parallel._sample_independence import buffer_versions

pytestmark = pytest.mark.timeout(170)


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy, world", [("pipeline", "world2"), ("zero3", "world2"), ("ddp", "world2")])
def test_grad_norm_matches_one_process(request, strategy, world):
    """The norm of all gradients is that of one process."""
    expected, norms = together.fitted("single_device", "Clipped")
    results = request.getfixturevalue(world).run(together.fitted, strategy, "Clipped", timeout=60)
    if strategy == "pipeline":  # the others have other data
        for _, ours in results:
            assert ours == pytest.approx(norms, rel=1e-4)
        same(results[0][0], expected)
    for _, ours in results:
        assert ours == pytest.approx(results[0][1], rel=1e-5) and ours


@pytest.mark.parametrize("model", ["Bounded", slow("BoundsInStepHooks")])
def test_code_per_parameter_runs(world2, model):
    """Code that treats each parameter by itself runs as it is."""
    expected, _ = together.fitted("single_device", model)
    same(world2.run(together.fitted, "pipeline", model, timeout=60)[0][0], expected)


@pytest.mark.parametrize("model", ["ClipsInAStepHook", slow("BoundsInStepHooks")])
def test_hooks_of_the_step_see_all_parameters(world2, model):
    """Under zero1 a rank steps only some of them."""
    expected = world2.run(together.fitted, "ddp", model, timeout=60)[0][0]
    same(world2.run(together.fitted, "zero1", model, timeout=60)[0][0], expected)


OVER_ALL_PARAMETERS = [
    ("ClipsAllParameters", "trainer.strategy.grad_norm"),
    ("ClipsAfterBackward", "self.clip_gradients"),
    ("ClipsTheGroups", "gradient_clip_val"),
    ("ClipsInAStepHook", "gradient_clip_val"),
    pytest.param("DividesByTheNorm", "the gradient of 'layers.", marks=pytest.mark.slow),
    pytest.param("ScalesParameters", "'layers.", marks=pytest.mark.slow),
    ("AddsUpSquares", "the gradient of 'layers."),
    ("LogsTheNorm", "the gradient of 'layers."),
    ("WithTeacher", "(EMA)"),
    ("WithFusedTeacher", "(EMA)"),
    ("SavesItself", "saved"),
]


@pytest.mark.parametrize("model, word", OVER_ALL_PARAMETERS, ids=lambda value: value)
def test_code_over_all_parameters_refused(world2, model, word):
    """Code over all parameters hears that it has one stage."""
    found = world2.run(together.refused, "pipeline", model, timeout=60)
    assert any(kind in ("ModelError", "ValueError") and word in message for kind, message, _ in found), found
    for kind, message, steps in found:
        assert kind != "nothing" and steps == 0
        assert "another stage of the pipeline" in message


@pytest.mark.parametrize(
    "model, word", [("OfInputs", "'x', which requires a gradient"), ("OfWeights", "differentiates by")], ids=str
)
def test_a_penalty_on_gradients_is_refused(world2, model, word):
    found = world2.run(together.refused, "pipeline", model, timeout=60)
    assert any(kind == "ModelError" and word in message and "'ddp'" in message for kind, message, _ in found), found
    assert all(kind != "nothing" and steps == 0 for kind, _, steps in found)


@pytest.mark.slow
def test_gradient_from_all_parameters_explained(world2):
    """A gradient that is assigned from all of them is explained."""
    found = world2.run(together.refused, "pipeline", "AssignsGradients", timeout=60)
    assert any(kind == "ModelError" and "trainer.strategy.grad_norm" in message for kind, message, _ in found), found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_penalty_over_all_parameters_refused(world2, schedule):
    """A penalty over all parameters is refused by all ranks together."""
    for kind, message, steps in world2.run(together.refused, "pipeline", "Penalized", None, None, schedule):
        assert (kind, steps) == ("ModelError", 0), message
        assert "A penalty over parameters" in message and "'layers.0.weight'" in message


@pytest.mark.parametrize("strategy", ["pipeline", slow("zero1")])
@pytest.mark.parametrize("optimizer", ["GlobalNorm", slow("AroundGlobalNorm")])
def test_an_optimizer_over_all_parameters_is_refused(world2, strategy, optimizer):
    for kind, message, steps in world2.run(together.refused, strategy, None, optimizer, timeout=60):
        assert (kind, steps) == ("ConfigurationError", 0), message
        assert optimizer.removesuffix("GlobalNorm") in message and "'ddp'" in message


@pytest.mark.parametrize("strategy", ["pipeline", "zero1"])
@pytest.mark.parametrize("optimizer", ["AddsNoise", "LateNoise"])
def test_an_optimizer_that_draws_random_numbers_is_refused(world2, strategy, optimizer):
    """A rank would draw for its own parameters alone, and so the same for those of each rank."""
    for _, message, steps in world2.run(together.refused, strategy, None, optimizer, timeout=60):
        assert steps <= 1, message
        assert f"{optimizer} draws random numbers" in message and "'ddp' or 'zero3'" in message


def test_zero1_refuses_late_global_optimizer(world2):
    """``zero1`` refuses an optimizer that comes to all parameters later."""
    for _, message, steps in world2.run(together.refused, "zero1", None, "LateNorm", timeout=60):
        assert "LateNorm looks at all of them together" in message and 0 < steps <= 14


@pytest.mark.parametrize("optimizer", ["LayerNorms", "Adafactor", slow("Rprop")])
def test_an_optimizer_over_each_parameter_is_not(world2, optimizer):
    expected, _ = together.fitted("single_device", None, optimizer)
    same(world2.run(together.fitted, "pipeline", None, optimizer, timeout=60)[0][0], expected)


def test_an_average_of_divided_parameters(world2):
    expected = together.averaged("single_device")
    for ours in world2.run(together.averaged, "zero3", timeout=60):
        same(ours, expected)


@slow
def test_a_compiled_model_is_watched_in_silence(world2):
    """torch.compile does not look into what compares gathered parameters with their parts."""
    expected, _ = together.compiled("single_device")
    for state, messages in world2.run(together.compiled, "zero3", timeout=120):
        assert messages == []
        if state:
            same(state, expected)


@pytest.mark.parametrize("name", together.OPTIMIZERS)
def test_a_small_copy_tells_whether_gradients_of_others_count(name):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 1000), nn.Linear(1000, 2), nn.LayerNorm(2)).bfloat16()
    before = [parameter.clone() for parameter in net.parameters()]
    optimizer = together.OPTIMIZERS[name](net.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    generator = torch.get_rng_state()
    # Late's norm comes after the steps that are tried
    if name.endswith("LayerNorms") or name in ("LateNorm", "Adafactor", "Rprop"):
        check_separable(optimizer, "pipeline", CPUAccelerator(), torch.device("cpu"))
    else:
        named = name.removesuffix("GlobalNorm")
        why = f"{name} draws random numbers" if name.endswith("Noise") else f"{named}.*all of them together"
        with pytest.raises(ConfigurationError, match=why):
            check_separable(optimizer, "pipeline", CPUAccelerator(), torch.device("cpu"))
    assert torch.equal(generator, torch.get_rng_state()) and not optimizer.state
    assert all(map(torch.equal, net.parameters(), before))
    assert all(parameter.grad is None for parameter in net.parameters())


def test_what_is_computed_of_a_remote_tensor_is_one():
    weight = remote(nn.Parameter(torch.ones(3, 2)), "head.weight")
    weight.grad = remote_gradient(weight)
    mine = torch.ones(3, 2)
    assert isinstance(weight, nn.Parameter) and weight.is_meta and weight.requires_grad
    for value in (weight.detach().norm(), mine + weight, torch.stack([mine, weight]), weight.grad.pow(2).sum()):
        assert value.is_meta and "head.weight" in repr(value)
    with torch.no_grad():
        weight.mul_(mine).clamp_(-1, 1)
        torch._foreach_mul_([weight, weight.grad], 0.5)
    assert torch.zeros_like(weight, device="cpu").tolist() == [[0.0] * 2] * 3
    weight.grad.zero_()
    weight.grad = None
    for read in (
        lambda: weight.sum().item(),
        lambda: bool(weight.norm() > 1),
        lambda: float(weight.detach()[0, 0]),
        weight.tolist,
        lambda: weight.detach().numpy(),
        weight.cpu,
        lambda: torch.equal(mine, weight),
        lambda: torch.save(weight, io.BytesIO()),
    ):
        with pytest.raises(ModelError, match=r"'head\.weight'.* is in another stage of the pipeline"):
            read()
    for write in (
        lambda: mine.add_(weight.detach()),
        lambda: mine.copy_(weight.detach()),
        lambda: torch.add(mine, weight.detach(), out=mine),
        lambda: torch._foreach_mul_([mine, weight.detach()], 0.5),
        lambda: operator.itruediv(mine, weight.norm()),
        lambda: operator.imul(mine, weight.detach().norm()),
    ):
        with pytest.raises(RemoteWriteError, match=r"'head\.weight'.* is in another stage of the pipeline"):
            write()
    assert torch.equal(mine, torch.ones(3, 2))


@pytest.mark.parametrize(
    "draw",
    [
        torch.randn_like, torch.rand_like, lambda weight: torch.empty_like(weight).bernoulli_(0.7),
        lambda weight: torch.native_dropout(weight.detach(), 0.5, True), torch.bernoulli,
        lambda weight: torch.randint_like(weight, -3, 3), lambda weight: weight.data.exponential_(),
        lambda weight: torch.normal(weight.detach(), 0.1), nn.init.trunc_normal_,
        lambda weight: nn.init.orthogonal_(weight, 1), lambda weight: nn.init.sparse_(weight, 0.1),
        lambda weight: torch.randn_like(weight, device="cpu"),
    ],
)  # fmt: skip
def test_a_remote_tensor_draws_what_its_values_would(draw):
    """And nothing is written to it."""
    weight = nn.Parameter(torch.ones(20, 8) / 2)
    states = []
    for each in (remote(weight, "head.weight"), weight):
        torch.manual_seed(0)
        draw(each)
        states.append(torch.get_rng_state())
    assert torch.equal(*states) and not torch.equal(states[0], torch.manual_seed(0).get_state())


def test_value_dependent_draw_refused():
    """What a remote tensor would draw by its values is refused."""
    with pytest.raises(ModelError, match=r"'head\.weight'.* aten::poisson, which draws random numbers by its values"):
        torch.poisson(remote(nn.Parameter(torch.ones(3, 2)), "head.weight"))


# -- over all samples ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["MeanOverTokens", "Contrastive"])
def test_loss_without_mean_refused(world2, model):
    """A loss that is no mean over samples is refused."""
    data = "padded" if model == "MeanOverTokens" else None
    for kind, message, steps in world2.run(together.refused, "pipeline", model, None, data, timeout=60):
        assert (kind, steps) == ("ModelError", 0)
        for word in (model, "4 microbatches", "no mean over samples", "schedule='gpipe'"):
            assert word in message


@pytest.mark.parametrize("data", ["padded_in_the_last", "padded_in_whole"])
def test_padding_in_any_microbatch_is_found(world2, data):
    for kind, message, steps in world2.run(together.refused, "pipeline", "MeanOverTokens", None, data, timeout=60):
        assert (kind, steps) == ("ModelError", 0) and "no mean over samples" in message


def test_equal_lengths_hide_it_briefly(world2):
    """Batches of one length do not hide it for long."""
    _, (kind, message, steps) = world2.run(
        together.refused, "pipeline", "MeanOverTokens", None, "padded_later", timeout=60
    )
    assert (kind, steps) == ("ModelError", 1), message


@pytest.mark.parametrize("model", ["MeanOverTokens", "Contrastive"])
def test_gpipe_computes_the_loss_of_the_whole_batch(world2, model):
    loss, expected, calls = together.trained("single_device", model)
    first, last = world2.run(together.trained, "pipeline", model, "gpipe", timeout=60)
    assert last[0] == pytest.approx(loss, rel=1e-5)
    assert last[2] == calls, "a step sees each batch once, and whole"
    same(first[1], expected)


def test_sum_over_batch_count_allowed(world2):
    """A sum over what the batch counts is right under any schedule."""
    loss, expected, calls = together.trained("single_device", "SumOverTokens")
    first, last = world2.run(together.trained, "pipeline", "SumOverTokens", "1f1b", timeout=60)
    assert last[0] == pytest.approx(loss, rel=1e-5)
    assert last[2] == [4] * 4 * len(calls), "the comparison leaves no traces"
    same(first[1], expected)


def test_noisy_loss_warns_once(world2):
    """Two microbatches are compared and a loss with noise is told of once."""
    (first, rehearsed), (last, sizes) = world2.run(together.compared, "NoisyOnceAgain", timeout=60)
    assert last == [] and len(first) == 1
    for word in ("NoisyOnceAgain", "draws random numbers (torch)", "schedule='1f1b'", "schedule='gpipe'"):
        assert word in first[0]
    parts = staged.BATCH // 4
    assert [size for size in sizes if size != staged.BATCH] == ([parts] * 2 + [2 * parts] + [parts] * 2) * 2
    assert set(rehearsed) == {staged.BATCH}


@pytest.mark.parametrize(
    "model, schedule", [("Centred", "1f1b"), slow("Centred", "gpipe"), slow("CentredLayer", "1f1b")]
)
def test_a_forward_that_mixes_samples_is_refused(world2, model, schedule):
    """By all ranks, before the first optimizer step, though a dropout makes each of its training steps another."""
    for kind, message, steps in world2.run(together.refused, "pipeline", model, None, None, schedule, timeout=60):
        assert (kind, steps) == ("ModelError", 0), message
        assert f"the forward of {model} mixes samples" in message and "'zero3'" in message


@pytest.mark.parametrize(
    "model, word",
    [
        ("BatchNormed", "'layers.1' is a batch norm: it normalizes with the statistics of 4 samples"),
        ("Counted", "changes the buffer 'layers.1.calls', and a pipeline runs"),
        slow("SpectralNormed", "changes the buffer 'layers.0.parametrizations.weight.0._u'"),
        ("NoisyForward", None), slow("Bounded", None),
    ],
    ids=str,
)  # fmt: skip
def test_what_microbatches_make_another_is_said_once(world2, model, word):
    (first, modes), (second, same_modes) = world2.run(together.warned, model, "1f1b", timeout=60)
    assert modes == same_modes == [1] * 4
    assert second == [] and len(first) == (word is not None), first
    assert word is None or word in first[0]


def test_inference_buffer_has_no_count():
    """As one that a validation has assigned."""
    layer = nn.Linear(1, 1)
    layer.register_buffer("kept", torch.ones(1))
    assert buffer_versions(layer).keys() == {"kept"}
    with torch.inference_mode():
        layer.kept = torch.ones(1)
    assert buffer_versions(layer) == {}
