"""Hooks on parameters and on the model run as under one device, under every strategy, or are refused."""

import pytest
import torch
from parameter_models import DIVIDED, Block, Net, check_alike, fit, outcome
from tiers import slow
from torch import nn

from torchhal.errors import DistributedError
from torchhal_parallel.hybrid import HybridStrategy

pytestmark = pytest.mark.timeout(120)


def final(name, strategy, devices):
    """The weights of a model of this file after a fit, or (the error's name, its words)."""
    return outcome(globals()[name], strategy, devices)


class Hooked(Net):
    """Nothing moves one weight, another's gradient is scaled by its own norm, a third's hook was removed again."""

    def __init__(self):
        super().__init__()
        self.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0)
        self.blocks[1].down.weight.register_hook(lambda gradient: gradient / gradient.norm().item())
        self.blocks[1].up.bias.register_hook(lambda gradient: gradient.mul_(3))
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.embed.weight.register_hook(lambda gradient: gradient * 0).remove()

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch and not batch_idx:
            self.late = self.norm.weight  # looked up while training

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.norm.bias.register_hook(lambda gradient: gradient * 0)


@pytest.mark.parametrize("strategy", DIVIDED)
def test_hooks_on_parameters_run(world2, strategy):
    """As under ddp on the gradient of a rank's own share of the batch; ranks of one layer share it."""
    reference = "one" if strategy == "tensor_parallel" else "ddp"
    expected = check_alike(world2, final, "Hooked", strategy, reference)
    assert torch.equal(expected["blocks.0.up.weight"], Net().blocks[0].up.weight)
    assert not torch.equal(expected["embed.weight"], Net().embed.weight)


class HookedItself(Net):
    """Hooks of the model are those of its forward, though a step of it may run as the forward of what wraps it."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_forward_pre_hook(lambda module, inputs: (inputs[0].flip(1),))
        self.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.25,))

    def on_fit_start(self):
        self.register_forward_hook(self.count)

    def count(self, module, inputs, output):
        self.calls += module.training
        return output * 0.5

    def on_train_end(self):
        assert self.calls == self.trainer.global_step


@pytest.mark.parametrize("strategy", ["ddp", "zero1", slow("zero2"), "zero3", "tensor_parallel"])
def test_hooks_on_the_model_see_its_forward(world2, strategy):
    expected = check_alike(world2, final, "HookedItself", strategy, "one")
    plain = final("Net", "single_device", 1)
    assert not torch.allclose(expected["head.weight"], plain["head.weight"])


class HookedStages(Hooked):
    """Hooks that are not linear, of all kinds, in both stages; the batch is computed in parts."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.register_full_backward_hook(lambda layer, inward, outward: (inward[0].clamp(-1e-3, 1e-3),))

    def on_train_start(self):
        self.get_parameter("blocks.0.down.weight").register_post_accumulate_grad_hook(take_the_sign)


def take_the_sign(weight):
    weight.grad.sign_()


def final_in_stages(name, schedule, data, accumulate):
    strategy = HybridStrategy(pipeline=2, data=data, schedule=schedule, microbatches=4)
    return fit(globals()[name](), strategy, 2 * data, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(("schedule", "accumulate"), [("1f1b", 1), slow("1f1b", 2), slow("gpipe", 1)])
def test_hooks_in_a_pipeline_see_gradients_of_a_batch(world2, schedule, accumulate):
    expected = fit(HookedStages(), "single_device", 1, accumulate_grad_batches=accumulate)
    for found in world2.run(final_in_stages, "HookedStages", schedule, 1, accumulate, timeout=60):
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.slow
def test_hooks_in_two_pipelines(world2, world4):
    """Hooks in two pipelines see gradients of their own batches."""
    expected = world2.run(final, "Hooked", "ddp", 2)[0]
    for found in world4.run(final_in_stages, "Hooked", "1f1b", 2, 1, timeout=60):
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.slow
def test_hooks_in_stages_that_are_sharded_are_refused(world4):
    for found in world4.run(refused_with_shards, timeout=60):
        assert found[0] == "ModelError" and "averages the gradients of each microbatch" in found[1], found


def refused_with_shards():
    try:
        return fit(Hooked(), HybridStrategy(pipeline=2, shard=2), 4)
    except Exception as error:
        return type(error).__name__, str(error)


def fit_hooked_twice(strategy):
    module, calls = Net(), []
    handle = module.blocks[0].up.weight.register_hook(lambda gradient: calls.append(tuple(gradient.shape)))
    fit(module, strategy, 2, batches=2)
    counts = [len(calls)]
    fit(module, strategy, 2, batches=2)
    counts.append(len(calls))
    module(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    counts.append(len(calls))
    handle.remove()
    module(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    return counts, len(calls), set(calls)


@pytest.mark.parametrize("strategy", DIVIDED)
def test_hook_stays_until_removed(world2, strategy):
    """A hook stays after the run until its handle removes it."""
    for counts, calls, shapes in world2.run(fit_hooked_twice, strategy, timeout=60):
        assert counts == [4, 8, 9] and calls == 9
        assert shapes == {(12, 8)}, "whole"


class LateHook(Net):
    """Registers a hook while it trains, on what trains in the place of a parameter."""

    def __init__(self):
        super().__init__()
        self.handle, self.calls = None, []

    def on_train_epoch_start(self):
        if self.handle is None:
            parameter = self.get_parameter("blocks.0.up.weight")
            self.handle = parameter.register_hook(lambda gradient: self.calls.append(tuple(gradient.shape)))

    def backward_once(self):
        self(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()


def fit_with_late_hook(strategy):
    """How often the hook has run after a fit, a backward, and both again; and after all of it without the hook."""
    module, counts = LateHook(), []
    for _ in range(2):
        fit(module, strategy, 2, batches=2)
        counts.append(len(module.calls))
        module.backward_once()
        counts.append(len(module.calls))
    module.handle.remove()
    module.backward_once()
    fit(module, strategy, 2, batches=2)
    return counts, len(module.calls), set(module.calls)


@pytest.mark.parametrize("strategy", ["zero3", "tensor_parallel"])
def test_handle_from_a_run_removes_hook(world2, strategy):
    """The handle of a hook from within a run removes it afterwards."""
    for counts, calls, shapes in world2.run(fit_with_late_hook, strategy, timeout=60):
        assert counts == [4, 5, 9, 10] and calls == 10
        assert (12, 8) in shapes


class Spare(Net):
    """Has a unit that no step runs."""

    def __init__(self):
        super().__init__()
        self.blocks.append(Block())
        self.calls = []
        self.blocks[2].up.weight.register_hook(lambda gradient: self.calls.append(gradient.shape))

    def forward(self, tokens):
        return self.head(self.norm(self.blocks[1](self.blocks[0](self.embed(tokens)))))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_hook_on_an_unused_unit(strategy):
    """A hook whose unit never ran stays the user's alone."""
    module = Spare()
    fit(module, strategy, 1, batches=2)
    unit = module.blocks[2]
    assert not unit._forward_pre_hooks
    unit(torch.ones(1, 8)).sum().backward()
    assert len(module.calls) == 1


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_parameters_have_no_mark_of_torchs_after_a_run(strategy):
    module = Net()
    fit(module, strategy, 1, batches=2)
    assert all(type(parameter) is nn.Parameter and not vars(parameter) for parameter in module.parameters())


class KeptWhole(Net):
    """Has a parameter that stays whole on every rank, and that each changes by itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.by = 1.0

    def forward(self, tokens):
        return super().forward(tokens) * self.scale

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.scale.add_(self.by * self.trainer.global_rank)


def fit_apart(strategy):
    """What a fit says of replicas that came apart; whether its module is whole, was trained, and trains again."""
    module = KeptWhole()
    before = dict(module.named_parameters())
    try:
        fit(module, strategy, 2, batches=2)
    except DistributedError as error:
        said = str(error)
    whole = all(module.get_parameter(name) is parameter for name, parameter in before.items())
    weight = module.embed.weight.detach().clone()
    trained = bool(weight.isfinite().all()) and not torch.equal(weight, Net().embed.weight)
    module.by = 0.0
    fit(module, strategy, 2, batches=2)
    return said, whole, trained, not torch.equal(weight, module.embed.weight)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_differing_replicas_leave_module_whole(world2, strategy):
    """Replicas that came apart are an error with the module whole."""
    for said, whole, trained, again in world2.run(fit_apart, strategy):
        assert "'scale' differ between ranks 0, 1" in said and whole and trained and again


class AccumulationHook(Net):
    def __init__(self):
        super().__init__()
        self.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())


@pytest.mark.parametrize("strategy", DIVIDED)
def test_a_hook_that_is_given_the_parameter_is_refused(world2, strategy):
    for kind, said in world2.run(final, "AccumulationHook", strategy, 2):
        assert kind == "ModelError"
        assert "'blocks.0.up.weight'" in said and "register_post_accumulate_grad_hook" in said and strategy in said


class Normalized(Net):
    """What libraries do: a weight norm of hooks, a parametrization, both inside the units and outside of them."""

    tensor_parallel_plan = {"blocks.0.up": "colwise", "blocks.0.down": "rowwise"}

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.blocks[1].up)
        nn.utils.parametrizations.spectral_norm(self.head)
        nn.utils.parametrize.register_parametrization(self.blocks[1].down, "weight", Symmetric())


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight - weight.mean()


class NormalizedInPlan(Normalized):
    tensor_parallel_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@pytest.mark.parametrize("strategy", ["zero3", "tensor_parallel"])
def test_parametrizations_train(world2, strategy):
    check_alike(world2, final, "Normalized", strategy, "one")


def test_a_parametrized_layer_in_the_plan_is_refused(world2):
    for kind, said in world2.run(final, "NormalizedInPlan", "tensor_parallel", 2):
        assert kind == "ConfigurationError" and "'blocks.1.up'" in said and "parametrization" in said
