"""What a model does with its own parameters is right under every strategy, or refused by name before it trains."""

import collections.abc
import functools
import gc
from types import SimpleNamespace

import models
import pytest
import torch
import training
from tiers import slow
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, Module
from torchhal.errors import ConfigurationError, DistributedError, ModelError
from torchhal_parallel import _parameter_objects as parameter_objects
from torchhal_parallel import _plain_semantics as plain_semantics
from torchhal_parallel._module_restore import ModuleSnapshot
from torchhal_parallel._parameter_objects import Memory, ParameterObjects, empty
from torchhal_parallel.hybrid import HybridStrategy

pytestmark = pytest.mark.timeout(120)

DIVIDED = ["zero2", "zero3", "tensor_parallel"]


class Net(models.Base):
    """Two blocks of which each is a unit, an embedding and a head outside of them, and a layer that nothing divides."""

    tensor_parallel_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_rep"}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def fit(module, strategy, devices, callbacks=(), batches=4, **options):
    trainer = training.small(strategy, devices, callbacks=list(callbacks), max_epochs=2, **options)
    module.train_dataloader = lambda: training.loader(trainer, models.Transformer, batches=batches)
    trainer.fit(module)
    return {name: value.clone() for name, value in module.state_dict().items()}


def final(name, strategy, devices):
    """The weights of a model of this file after a fit, or (the error's name, its words)."""
    try:
        return fit(globals()[name](), strategy, devices)
    except Exception as error:
        return type(error).__name__, str(error)


class TriedOnce(Net):
    """A forward in ``__init__``, of which a cycle is left that holds its graph."""

    def __init__(self):
        super().__init__()
        cycle = [self(torch.zeros(1, 3, dtype=torch.long))]
        cycle.append(cycle)


def final_without_collections(name, strategy, devices):
    """The same where Python collects no garbage by itself, as large runs have it."""
    gc.disable()
    try:
        return final(name, strategy, devices)
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", [slow("zero2"), "zero3"])
def test_garbage_uses_no_parameter(world2, strategy):
    for found in world2.run(final_without_collections, "TriedOnce", strategy, 2, timeout=60):
        assert isinstance(found, dict), found


def check_alike(world, name, strategy, reference):
    """Every rank's weights are those of ``reference``: "ddp", or one device on the joined batch."""
    expected = world.run(final, name, "ddp", 2)[0] if reference == "ddp" else final(name, "single_device", 1)
    for found in world.run(final, name, strategy, 2, timeout=60):
        assert isinstance(found, dict), found
        assert found.keys() == expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)
    return expected


# -- hooks on parameters -----------------------------------------------------------------------------------------


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
    expected = check_alike(world2, "Hooked", strategy, reference)
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
    expected = check_alike(world2, "HookedItself", strategy, "one")
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
def test_hooks_in_two_pipelines_see_gradients_of_their_own_batches(world2, world4):
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
def test_a_hook_stays_after_the_run_until_its_handle_removes_it(world2, strategy):
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
def test_the_handle_of_a_hook_from_within_a_run_removes_it_afterwards(world2, strategy):
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
def test_a_hook_whose_unit_never_ran_stays_the_users_alone(strategy):
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
def test_replicas_that_came_apart_are_an_error_with_the_module_whole(world2, strategy):
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
    check_alike(world2, "Normalized", strategy, "one")


def test_a_parametrized_layer_in_the_plan_is_refused(world2):
    for kind, said in world2.run(final, "NormalizedInPlan", "tensor_parallel", 2):
        assert kind == "ConfigurationError" and "'blocks.1.up'" in said and "parametrization" in said


# -- parameters remembered since __init__ ------------------------------------------------------------------------


class InList(Net):
    def __init__(self):
        super().__init__()
        self.penalised = [block.up.weight for block in self.blocks]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(weight.square().sum() for weight in self.penalised)


class InDict(Net):
    def __init__(self):
        super().__init__()
        self.tables = {"heads": [(self.head.weight, self.head.bias)]}

    def forward(self, tokens):
        return F.linear(self.norm(self.embed(tokens)), *self.tables["heads"][0]) + 0 * super().forward(tokens)


class ByIdentity(Net):
    def __init__(self):
        super().__init__()
        self.no_decay = {id(parameter) for name, parameter in self.named_parameters() if "bias" in name or "up" in name}

    def configure_optimizers(self):
        decayed = [parameter for parameter in self.parameters() if id(parameter) not in self.no_decay]
        others = [parameter for parameter in self.parameters() if id(parameter) in self.no_decay]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.5}, {"params": others}], lr=0.1)


class InGroups(Net):
    def __init__(self):
        super().__init__()
        self.heads = list(self.head.parameters())

    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.heads}, {"params": list(self.blocks.parameters())}], lr=0.1)


class InClosure(Net):
    def __init__(self):
        super().__init__()
        weight = self.head.weight
        self.penalty = functools.partial(lambda factor: factor * weight.square().sum(), 0.1)


class Penalty:
    def __init__(self, weight):
        self.weight = weight


class InLoss(Net):
    def __init__(self):
        super().__init__()
        self.criterion = Penalty(self.blocks[0].down.weight)


class InModule(Net):
    """A module that has another's parameter is one more place of it."""

    tensor_parallel_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.criterion = nn.Module()
        self.criterion.weight = self.blocks[0].down.weight


REMEMBERED = [
    ("InList", "InList.penalised[0]", "'blocks.0.up.weight'"),
    ("InDict", "InDict.tables['heads'][0][0]", "'head.weight'"),
    ("ByIdentity", "ByIdentity.no_decay", "the id() of '"),
    ("InGroups", "InGroups.heads[0]", "'head.weight'"),
    ("InClosure", "'weight' of the function", "'head.weight'"),
    ("InLoss", "InLoss.criterion.weight", "'blocks.0.down.weight'"),
]


class Viewing(Net):
    """Under ddp, each view follows the weight that is trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", self.head.weight.data[:2], persistent=False)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.scale.square().sum())


class ByAddress(Net):
    def __init__(self):
        super().__init__()
        self.decays = {weight.data_ptr(): 0.5 for weight in self.parameters() if weight.dim() > 1}

    def configure_optimizers(self):
        groups = [
            {"params": [weight], "weight_decay": self.decays.get(weight.data_ptr(), 0.0)}
            for weight in self.parameters()
        ]
        return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("strategy", ["zero3", slow("tensor_parallel")])
@pytest.mark.parametrize(
    "name, path, what",
    [
        ("Viewing", "Viewing.scale", "the memory of 'head.weight'"),
        ("ByAddress", "a key of ByAddress.decays", "the data_ptr() of '"),
    ],
)
def test_what_remembers_the_memory_of_a_parameter_is_refused(world2, strategy, name, path, what):
    for kind, said in world2.run(final, name, strategy, 2):
        assert kind == "ModelError" and f"{path} remembers {what}" in said


@pytest.mark.parametrize("strategy", ["zero3", "tensor_parallel", "pipeline"])
@pytest.mark.parametrize("name, path, parameter", REMEMBERED, ids=[case[0] for case in REMEMBERED])
def test_what_remembers_a_parameter_is_refused(world2, strategy, name, path, parameter):
    if (strategy, name) == ("pipeline", "InDict"):
        pytest.skip("its forward uses one norm in two stages, which is refused before")
    found = world2.run(final, name, strategy, 2)
    assert [kind for kind, _ in found] == ["ModelError"] * 2, "also where a stage has the parameter itself"
    for _, said in found if strategy != "pipeline" else [min(found, key=lambda each: path not in each[1])]:
        assert path in said and parameter in said and strategy in said


def fixed_after_a_refusal(strategy):
    """Whether the module that a fit has refused is what it was, and trains in the next one."""
    module = InList()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()}
    try:
        fit(module, strategy, 2, batches=2)
    except ModelError as error:
        found = ["InList.penalised" in str(error)]
    found += [parameter is before[name][0] for name, parameter in module.named_parameters()]
    found += [torch.equal(parameter, before[name][1]) for name, parameter in module.named_parameters()]
    module.penalised = []
    fit(module, strategy, 2, batches=2)
    return [*found, not torch.equal(module.head.weight, before["head.weight"][1])]


@pytest.mark.parametrize("strategy", [slow("zero3"), slow("tensor_parallel"), "pipeline"])
def test_a_refused_model_is_whole_again(world2, strategy):
    for found in world2.run(fixed_after_a_refusal, strategy, timeout=60):
        assert all(found) and len(found) > 20, found


def refused_in_the_set_up():
    """(the module's parameters are what they were, what the next fit says) after a policy that fits nothing."""
    module = Net()
    before = dict(module.named_parameters())
    said = []
    for policy in ([nn.Conv3d], None):
        try:
            fit(module, HybridStrategy(pipeline=2, activation_checkpointing=policy), 2, batches=2)
        except ConfigurationError as error:
            said.append(str(error))
            said.append(all(parameter is before[name] for name, parameter in module.named_parameters()))
    return said


def test_a_policy_is_refused_before_anything_is_divided(world2):
    for said, whole in world2.run(refused_in_the_set_up, timeout=60):
        assert "'activation_checkpointing' chooses no submodule" in said and whole


class Remembering(Callback):
    def __init__(self, weight):
        self.weight = weight


def fit_with_callback(strategy):
    module = Net()
    try:
        fit(module, strategy, 2, [Remembering(module.head.weight)])
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("strategy", ["zero3", "tensor_parallel"])
def test_a_callback_that_remembers_a_parameter_is_refused(world2, strategy):
    for said in world2.run(fit_with_callback, strategy):
        assert "the callback Remembering.weight" in said and "'head.weight'" in said


class KeepsOptimizer(Net):
    def configure_optimizers(self):
        self.kept = super().configure_optimizers()
        return self.kept


class StepsItsOwn(Net):
    """With an optimizer from before the model was divided, of which nobody is told."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.kept = torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.kept.step()

    def configure_optimizers(self):
        return None


def fit_twice(strategy):
    module = KeepsOptimizer()
    module.left = SimpleNamespace(scheduler=torch.optim.lr_scheduler.StepLR(Net.configure_optimizers(module), 1))
    fit(module, strategy, 2)
    first = module.kept
    fit(module, strategy, 2)
    steps = [p for group in module.kept.param_groups for p in group["params"]]
    return first is not module.kept and len(steps) > 0


@pytest.mark.parametrize("strategy", ["zero3", "tensor_parallel"])
def test_an_optimizer_of_an_earlier_fit_is_no_reference(world2, strategy):
    assert world2.run(fit_twice, strategy, timeout=60) == [True, True]


def test_an_old_optimizer_that_a_module_steps_itself_is_refused(world2):
    for kind, said in world2.run(final, "StepsItsOwn", "zero3", 2):
        assert kind == "ModelError" and "StepsItsOwn.kept (SGD).param_groups" in said


def test_a_parameter_of_two_modules_is_divided_under_both_names_or_refused(world2):
    check_alike(world2, "InModule", "zero3", "one")
    for kind, said in world2.run(final, "InModule", "tensor_parallel", 2):
        assert kind == "ModelError" and "'blocks.0.down.weight'" in said and "'criterion.weight'" in said


ELSEWHERE = {}


class InGlobal(Net):
    """Nobody looks there before the first step."""

    def __init__(self):
        super().__init__()
        ELSEWHERE["weight"] = self.head.weight

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * ELSEWHERE["weight"].square().sum()


@pytest.mark.parametrize("strategy", ["zero3", "tensor_parallel"])
def test_what_is_remembered_elsewhere_fails_in_the_first_step(world2, strategy):
    for kind, said in world2.run(final, "InGlobal", strategy, 2):
        assert kind == "ModelError" and "'head.weight' by a reference from before" in said


class InGlobalOfTheFirstStage(InGlobal):
    def __init__(self):
        super().__init__()
        ELSEWHERE["weight"] = self.embed.weight


def test_what_is_remembered_of_another_stage_fails_in_the_first_step(world2):
    for kind, said in world2.run(final, "InGlobalOfTheFirstStage", "pipeline", 2, timeout=60):
        assert kind == "ModelError" and "'embed.weight' by a reference from before" in said


def kept_outside(strategy, model):
    """Whether outside references are the module's own parameters after each of two fits, and stay marked."""
    module = Net() if model == "Net" else getattr(models, model)()
    references = dict(module.named_parameters(remove_duplicate=False))
    for parameter in references.values():
        parameter.mark = "mine"
    found = []
    for _ in range(2):
        before = {name: parameter.detach().clone() for name, parameter in references.items()}
        fit(module, strategy, 2, batches=2)
        now = dict(module.named_parameters(remove_duplicate=False))
        found.append(all(now[name] is parameter for name, parameter in references.items()))
        found.append(not all(torch.equal(now[name], value) for name, value in before.items()))
        found.append(all(type(p) is nn.Parameter and p.device.type == "cpu" for p in references.values()))
        found.append(all(p.mark == "mine" and p.requires_grad for p in references.values()))
    references["embed.weight"].data.zero_()
    found.append(not module.state_dict()["embed.weight"].any())
    return found


@pytest.mark.parametrize(
    "strategy, model",
    [("zero2", "Net"), ("zero3", "Net"), ("zero3", "Recurrent"), ("tensor_parallel", "Net"), ("pipeline", "Net")],
)
def test_an_outside_reference_follows_the_weight(world2, strategy, model):
    for found in world2.run(kept_outside, strategy, model, timeout=60):
        assert found == [True] * 9


class TestFindReferences:
    def find(self, **roots):
        return list(parameter_objects.find_references(roots, {id(self.weight): "w"}, memory=self.memory))

    def setup_method(self):
        self.weight = nn.Parameter(torch.ones(2))
        self.memory = Memory()
        self.memory.add("w", self.weight)

    def test_views_and_addresses_from_before_it_was_freed(self):
        row, array, address = self.weight.detach()[:1], self.weight.detach().numpy(), self.weight.data_ptr()
        kept = [self.weight.data.clone(), row, array, torch.ones(2), torch.ones(2).numpy(), address, address + 4]
        empty(self.weight)
        memory, by_address = "the memory of ", "the data_ptr() of "
        assert self.find(a=kept) == [
            ("a[1]", "w", memory), ("a[5]", "w", by_address), ("a[2]", "w", memory)
        ]  # fmt: skip

    def test_a_neighbour_in_one_storage_is_no_view(self):
        flat = torch.ones(6)
        self.weight = nn.Parameter(flat[2:4])
        self.memory = Memory()
        for name, parameter in (("v", flat[4:]), ("w", self.weight)):
            self.memory.add(name, parameter)
        empty(self.weight)
        assert self.find(a=[flat[:2], flat[0::6], flat[3:3]]) == []
        assert self.find(a=[flat, flat[1:3], flat[5:]]) == [
            (f"a[{index}]", name, "the memory of ") for index, name in enumerate("vwv")
        ]

    def test_a_number_may_be_a_string(self):
        address = str(self.weight.data_ptr())
        found = self.find(a={str(id(self.weight)): 0, hex(id(self.weight)): 1}, b=[address, "0x", "1_0", "", "7"])
        assert sorted(found) == [("a key of a", "w", "the id() of ")] * 2 + [("b[0]", "w", "the data_ptr() of ")]

    def test_what_lies_where_a_freed_one_was_is_another(self):
        storage = self.weight.untyped_storage()._cdata
        empty(self.weight)
        others = [torch.ones(2) for _ in range(100)]
        assert storage not in [other.untyped_storage()._cdata for other in others] and self.find(a=others) == []

    def test_a_module_may_hold_its_own(self):
        module = nn.Module()
        module.inner = nn.Module()
        module.inner.weight = self.weight
        assert self.find(net=module) == []

    def test_what_refers_to_itself_ends(self):
        loop = [self.weight]
        loop.append(loop)
        assert self.find(net=loop) == [("net[0]", "w", "")]

    def test_slots_keys_and_sets(self):
        class Slotted:
            __slots__ = ("keep",)

        slotted = Slotted()
        slotted.keep = {self.weight}
        assert sorted(self.find(a=slotted, b={self.weight: 1})) == [("a key of b", "w", ""), ("a.keep", "w", "")]

    def test_data_is_not_gone_through_for_ever(self, monkeypatch):
        monkeypatch.setattr(parameter_objects, "_MOST_OBJECTS", 1000)
        data = [[index] for index in range(2000)]
        assert self.find(data=[*data, self.weight]) == []
        assert self.find(data=data, near=[[self.weight]]) == [("near[0][0]", "w", "")], "a limit for each root"

    def test_no_more_of_a_container_is_made_than_is_looked_at(self, monkeypatch):
        monkeypatch.setattr(parameter_objects, "_MOST_ITEMS", 5)
        names = []

        class Named(int):
            def __repr__(self):
                names.append(int(self))
                return "Named"

        assert self.find(data={(Named(index),): index for index in range(1000)}, near=[0, self.weight]) == [
            ("near[1]", "w", "")
        ]
        assert len(names) == 5

    def test_what_makes_its_items_when_it_is_asked_is_left_alone(self):
        class OnDisk(collections.abc.Mapping, dict):
            def __getitem__(self, key):
                raise AssertionError

            __iter__ = __len__ = __getitem__

        class Rows(collections.abc.Mapping):
            __getitem__ = __iter__ = __len__ = OnDisk.__getitem__

            def __init__(self, weight):
                self.kept = weight

        data = OnDisk()
        dict.__setitem__(data, "w", self.weight)
        assert sorted(self.find(data=data, rows=Rows(self.weight))) == [("data['w']", "w", ""), ("rows.kept", "w", "")]


# -- what a forward writes ---------------------------------------------------------------------------------------


class Bounded(Net):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, max_norm=1.0)


class BoundedInPlan(Bounded):
    tensor_parallel_plan = {**Net.tensor_parallel_plan, "embed": "rowwise_rep"}


class BoundedByHand(Net):
    def forward(self, tokens):
        x = F.embedding(tokens, self.embed.weight, max_norm=0.5)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, scale_grad_by_freq=True)


class Clamping(Block):
    def forward(self, x):
        self.up.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamped(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1] = Clamping()


class WrittenByBatch(Net):
    """Each rank scales weights by what is in its batch, those of a block and those that the root holds."""

    def forward(self, tokens):
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(1 - 0.01 * tokens.float().mean())
        return super().forward(tokens)


class ClampedInStep(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return loss


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_an_embedding_that_bounds_its_rows_is_refused(world2, strategy):
    for kind, said in world2.run(final, "Bounded", strategy, 2):
        assert kind == "ModelError" and "'embed'" in said and "max_norm=1.0" in said and "renorm_(2.0, 0, 1.0)" in said


@pytest.mark.parametrize("strategy, who", [("zero3", "each of 2 replicas"), ("pipeline", "each microbatch")])
def test_an_embedding_that_counts_its_rows_is_refused(world2, strategy, who):
    for kind, said in world2.run(final, "Counting", strategy, 2):
        assert kind == "ModelError" and "'embed'" in said and "scale_grad_by_freq=True" in said and who in said


def test_an_embedding_that_bounds_its_rows_is_right_where_ranks_share_a_batch(world2):
    check_alike(world2, "Bounded", "tensor_parallel", "one")
    for kind, said in world2.run(final, "BoundedInPlan", "tensor_parallel", 2):
        assert kind == "ConfigurationError" and "'embed'" in said and "max_norm" in said


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize(
    "name, parameter",
    [
        ("BoundedByHand", "'embed.weight'"),
        ("Clamped", "'blocks.1.up.weight'"),
        ("ClampedInStep", "'head.weight'"),
    ],
)
def test_a_write_that_would_be_lost_is_refused(world2, strategy, name, parameter):
    for kind, said in world2.run(final, name, strategy, 2):
        assert kind in ("ModelError", "RankFailedError")
        assert parameter in said and "would lose" in said and strategy in said


def test_replicas_that_a_forward_has_parted_are_found_after_the_fit(world2):
    for kind, said in world2.run(final, "BoundedByHand", "ddp", 2):
        assert kind == "DistributedError" and "'embed.weight'" in said and "ranks 0, 1" in said


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_write_by_the_batch_to_what_is_divided_is_refused(world2, strategy):
    for kind, said in world2.run(final, "WrittenByBatch", strategy, 2):
        assert kind == ("DistributedError" if strategy == "zero1" else "ModelError")
        assert "'blocks.1.up.weight'" in said
        assert ("before step 1 of its optimizer" if strategy == "zero1" else "has it in parts") in said


class WrittenLater(Net):
    """From its third step on, to a parameter of the root, which is gathered."""

    def training_step(self, batch, batch_idx):
        if self.global_step >= 2:
            with torch.no_grad():
                self.norm.bias.mul_(0.5)
        return super().training_step(batch, batch_idx)


class WrittenByNumber(Net):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(1 - 0.01 * batch[0].float().mean().item())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("WrittenLater", "ModelError", ["'norm.bias'", "would lose"]),
        ("WrittenByNumber", "DistributedError", ["same numbers", "'zero3'"]),
    ],
)
def test_a_write_that_the_first_step_does_not_show_is_refused(world2, name, kind, words):
    for found, said in world2.run(final, name, "zero3", 2):
        assert found in (kind, "RankFailedError") and all(word in said for word in words), said


class SavedWhenParted(WrittenByNumber):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        try:
            self.trainer.save_checkpoint("never.ckpt")
        except DistributedError as error:
            raise ValueError(f"{error} after step {self.global_step}") from error


def test_parts_that_do_not_belong_together_are_never_saved(world2):
    for found, said in world2.run(final, "SavedWhenParted", "zero3", 2):
        assert found == "ValueError" and "same numbers" in said and said.endswith("after step 1"), said


class Stepping(WrittenByNumber):
    steps = 0

    def on_train_batch_start(self, batch, batch_idx):
        Stepping.steps += 1


def steps_of_parted():
    Stepping.steps = 0
    with pytest.raises(DistributedError, match="same numbers"):
        fit(Stepping(), "zero3", 2)
    return Stepping.steps


def test_parts_that_do_not_belong_together_train_no_second_epoch(world2):
    assert world2.run(steps_of_parted) == [4, 4]


@pytest.mark.parametrize("left_inside", [False, True])
def test_what_another_library_handles_stays_its_own(left_inside):
    """loss_parallel, entered or left in a step, is around its backward too, which comes after the step."""
    before = dict(plain_semantics._handlers())
    others = loss_parallel()
    if left_inside:
        others.__enter__()
    with plain_semantics.watched_writes(lambda *_: None):
        others.__exit__(None, None, None) if left_inside else others.__enter__()
    assert (plain_semantics._handlers() == before) is left_inside
    if not left_inside:
        others.__exit__(None, None, None)
    assert plain_semantics._handlers() == before


class RateByLoss(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.1 / (
            1 + float(outputs["loss"] if isinstance(outputs, dict) else outputs)
        )


class MomentumByBatch(Net):
    """Of the last batch of all alone."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch and batch_idx == 3:
            self.optimizers().param_groups[0]["momentum"] = torch.tensor(batch[0].float().mean().item() / 100)


class RateByEpoch(RateByLoss):
    """The same on each rank."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = torch.tensor(0.1 / (1 + batch_idx))


@pytest.mark.parametrize("name, key", [("RateByLoss", "'lr'"), slow("MomentumByBatch", "'momentum'")])
@pytest.mark.parametrize("strategy", ["zero1", slow("zero2"), "zero3", slow(HybridStrategy(shard=2))])
def test_optimizers_that_step_by_other_numbers_on_each_rank_are_refused(world2, strategy, name, key):
    for kind, said in world2.run(final, name, strategy, 2):
        assert kind == "DistributedError", said
        assert f"param_groups[0][{key}] of SGD is " in said and " on rank 0 and " in said and " on rank 1" in said


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_rate_that_all_ranks_have_is_none_of_these(world2, strategy):
    check_alike(world2, "RateByEpoch", strategy, "ddp")


class ScaledGradients(Net):
    """By the loss of a rank's own batch, as a number."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.mean = batch[0].float().mean()

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.mul_(1 + getattr(self, "mean", torch.zeros(())).item())


class ScaledByTensor(ScaledGradients):
    def on_before_optimizer_step(self, optimizer):
        torch._foreach_mul_([each.grad for each in self.parameters()], getattr(self, "mean", torch.ones(())))


class ScaledWeights(Net):
    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(1 - 0.01 * batch[0].float().mean().item())


class ScalesInCallback(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.head.weight.data.mul_(1 - 0.01 * batch[0].float().mean().item())


class ScaledByCallback(Net):
    def configure_callbacks(self):
        return [ScalesInCallback()]


@pytest.mark.parametrize("strategy", ["zero1", slow("zero2"), "zero3", slow(HybridStrategy(shard=2))])
@pytest.mark.parametrize("name", ["ScaledGradients", "ScaledByTensor", "ScaledWeights", "ScaledByCallback"])
def test_hooks_that_write_other_numbers_on_each_rank_are_refused(world2, strategy, name):
    for kind, said in world2.run(final, name, strategy, 2):
        assert kind == "DistributedError", (kind, said)
        assert ("before step 2 of its" if strategy == "zero1" else "did not write the same numbers") in said or (
            strategy == "zero1" and "before step 1 of its optimizer" in said
        ), said


class ScaledAlike(Net):
    """A number, a tensor, and what is no parameter's."""

    def on_before_optimizer_step(self, optimizer):
        factor = 1 / (1 + self.trainer.strategy.grad_norm(optimizer))
        for parameter in self.parameters():
            parameter.grad.clone().mul_(self.trainer.global_rank)
            parameter.grad.mul_(factor).mul_(0.9)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.head.weight.mul_(1 - self.trainer.strategy.reduce(batch[0].float().mean()).item() / 100)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_hooks_may_write_the_same_on_each_rank(world2, strategy):
    check_alike(world2, "ScaledAlike", strategy, "ddp")


class ReplacesWeight(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch and batch_idx == 1:
            self.blocks[0].up.weight = nn.Parameter(torch.ones(12, 8))


class ReplacesLayer(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch and batch_idx == 1:
            self.norm = nn.LayerNorm(8)


@pytest.mark.parametrize("strategy", [slow("zero2"), "zero3", "tensor_parallel", slow("pipeline")])
def test_a_parameter_that_is_replaced_while_it_is_trained_is_refused(world2, strategy):
    for kind, said in world2.run(final, "ReplacesWeight", strategy, 2):
        assert (
            kind in ("ModelError", "RankFailedError") and "'blocks.0.up.weight' of ReplacesWeight is replaced" in said
        )


@pytest.mark.parametrize("strategy", ["zero3", slow("tensor_parallel")])
def test_a_layer_that_is_replaced_in_the_last_epoch_is_refused(world2, strategy):
    for kind, said in world2.run(final, "ReplacesLayer", strategy, 2):
        assert kind == "ModelError" and "'norm.weight' has come into ReplacesLayer" in said, said


def test_an_assignment_may_follow_a_fit():
    module = Net()
    fit(module, "zero3", 1)
    module.head.weight = nn.Parameter(torch.zeros(20, 8))


class Momentum(Net):
    """A teacher that follows by its blocks from the second step on, and a critic's clamp: by numbers that all have."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for teacher, student in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                if self.global_step:
                    teacher.mul_(0.9).add_(student, alpha=1 - 0.9)
            self.blocks[0].up.weight.data.clamp_(-0.3, 0.3)
        x = self.embed(batch[0])
        for block in self.teacher:
            x = block(x)
        return super().training_step(batch, batch_idx) + 0.01 * self.head(x).square().mean()


@pytest.mark.parametrize("strategy", ["zero2", slow("zero3")])
def test_a_momentum_teacher_and_a_clamp_are_those_of_one_device(world2, strategy):
    check_alike(world2, "Momentum", strategy, "ddp")


def test_one_device_writes_what_it_likes_to_its_only_part():
    assert final("WrittenByBatch", "zero3", 1).keys() == Net().state_dict().keys()


class TwoOptimizers(Net):
    """The first one's parameters are written to by each rank from the second batch on."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.embed.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)]

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        with torch.no_grad():
            self.embed.weight.add_(0.1 * self.trainer.global_rank * batch_idx)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def test_replicas_of_each_of_two_optimizers_are_compared(world2):
    for kind, said in world2.run(final, "TwoOptimizers", "zero1", 2):
        assert kind == "DistributedError" and "before step 2 of its optimizer" in said and "'embed.weight'" in said


class Drifting(Net):
    """Layers that nothing divides, written to by each rank."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.norm.bias.add_(0.1 * self.trainer.global_rank)


def test_ranks_of_one_layer_that_came_apart_are_found(world2):
    for kind, said in world2.run(final, "Drifting", "tensor_parallel", 2):
        assert kind == "DistributedError" and "'norm.bias'" in said


# -- backward passes inside a step -------------------------------------------------------------------------------


class Critic(Module):
    """A gradient penalty (WGAN-GP): the norm of the gradient by the input is differentiated once more."""

    def __init__(self, penalty=True):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(10, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_(True)
        score = self(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        self.seen = self.last.bias.detach().clone()
        return score.square().mean() + 3 * (gradient.norm(dim=1) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Forces(Critic):
    """The gradient by the input is itself the loss, as of an energy; the layers are used again after it."""

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_(True)
        (force,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return (force - 1).square().mean() + 0.1 * self(x.detach()).square().mean()


class Linear(Forces):
    """The graph of the gradient is one of its own: no gradient of it passes a layer's forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class OncePerStep(Critic):
    """A gradient without a graph, in the midst of the step."""

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_(True)
        (gradient,) = torch.autograd.grad(self(x).sum(), x)
        return self(x.detach() + 0.1 * gradient).square().mean()


def penalised(strategy, devices, name):
    trainer = training.small(strategy, devices, max_epochs=3)
    module = globals()[name]()
    samples = torch.randn(16, 6, generator=torch.Generator().manual_seed(5))
    try:
        trainer.fit(module, DataLoader(TensorDataset(samples), 4))
    except Exception as error:
        return type(error).__name__, str(error)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("name", ["Critic", "Forces", "Linear", "OncePerStep"])
def test_a_gradient_inside_a_step_may_be_differentiated(world2, strategy, name):
    expected = world2.run(penalised, "ddp", 2, name)[0]
    for found in world2.run(penalised, strategy, 2, name):
        assert isinstance(found, dict), found
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)


class PenaltyThroughPlan(Critic):
    """Late, as a penalty at some steps only is."""

    tensor_parallel_plan = {"first": "colwise", "last": "rowwise"}

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def training_step(self, batch, batch_idx):
        if self.global_step < 2:
            return self(batch[0]).square().mean()
        return super().training_step(batch, batch_idx)


class PenaltyByWeights(PenaltyThroughPlan):
    def training_step(self, batch, batch_idx):
        loss = self(batch[0]).square().mean()
        gradients = torch.autograd.grad(loss, list(self.first.parameters()), create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in gradients)


@pytest.mark.parametrize("name", ["PenaltyThroughPlan", "PenaltyByWeights"])
def test_a_gradient_through_divided_layers_may_not_be_differentiated(world2, name):
    for kind, said in world2.run(penalised, "tensor_parallel", 2, name):
        assert kind == "ModelError", said
        assert "'last'" in said and "create_graph=True" in said and "'tensor_parallel'" in said


class OutsideOfPlan(Critic):
    """The first derivative through divided layers, the second beside them."""

    tensor_parallel_plan = {"first": "colwise_rep"}

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0].requires_grad_(True))
        (gradient,) = torch.autograd.grad(self.last(torch.tanh(x)).sum(), x, create_graph=True)
        (plain,) = torch.autograd.grad(self(batch[0]).sum(), batch[0])
        return (gradient.norm(dim=1) - 1).square().mean() + self(batch[0] + plain).square().mean()


def test_other_gradients_inside_a_step_are_right_where_layers_are_divided(world2):
    expected = penalised("single_device", 1, "OutsideOfPlan")
    for found in world2.run(penalised, "tensor_parallel", 2, "OutsideOfPlan"):
        assert isinstance(found, dict), found
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)


# -- numbers of parameters and gradients -------------------------------------------------------------------------


class ByNorm(torch.optim.Optimizer):
    """Each parameter's step is as long as the largest element of its gradient says."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / (1 + float(parameter.grad.abs().max())))


class ByNumbers(Net):
    """Python numbers of the loss's weights, of all gradients and of each change what is trained."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.head.weight.norm().item())

    def on_before_optimizer_step(self, optimizer):
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        norm = sum(gradient.norm().item() ** 2 for gradient in gradients) ** 0.5
        if any(gradient.mean() > 1e-3 for gradient in gradients):
            norm *= 2
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (norm + int((self.head.weight > 0).sum()) / 100)

    def configure_optimizers(self):
        return ByNorm(self.parameters())


@pytest.mark.parametrize("strategy", DIVIDED)
def test_numbers_of_divided_tensors_are_those_of_the_whole(world2, strategy):
    reference = "one" if strategy == "tensor_parallel" else "ddp"
    check_alike(world2, "ByNumbers", strategy, reference)
    assert world2.run(number_handlers) == [[]] * 2


def number_handlers():
    handlers = DTensor._op_dispatcher._custom_op_handlers
    ours = ("_local_scalar_dense", "normal_", "randn_like")
    found = [str(operator) for operator in handlers if any(name in str(operator) for name in ours)]
    return found + ["data"] * ("data" in vars(DTensor))


def whole_of(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


class ByData(torch.optim.Optimizer):
    """Steps as many of the older optimizers do; of what views give it only reads."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                first = parameter.grad[0].norm()
                parameter.data = parameter.data - group["lr"] * parameter.grad.data * (1 + first)


class AssignsData(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.head.weight.data = self.head.weight.data.clamp(-0.2, 0.2)
        self.head.bias.data = torch.linspace(-1, 1, 20)
        self.embed.weight[0].clone().zero_()
        self.blocks[0].up.weight.data = whole_of(self.blocks[0].up.weight) * torch.ones(12, 8).tril()

    def on_before_optimizer_step(self, optimizer):
        gradient = self.blocks[1].down.weight.grad
        gradient.data = whole_of(gradient) * torch.ones(8, 12).triu()

    def configure_optimizers(self):
        return ByData(self.parameters())


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "tensor_parallel"])
def test_data_of_a_parameter_can_be_assigned(world2, strategy):
    check_alike(world2, "AssignsData", strategy, "one" if strategy == "tensor_parallel" else "ddp")
    assert world2.run(number_handlers) == [[]] * 2


# -- random numbers ----------------------------------------------------------------------------------------------


class Redrawn(Net):
    """Layers that begin anew, and noise on weights and gradients of each kind that torch draws."""

    def on_train_epoch_start(self):
        for module in self.modules():
            if self.current_epoch and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            gradient = parameter.grad
            gradient.add_(torch.randn_like(gradient), alpha=0.01)
            gradient.mul_(torch.empty_like(gradient).bernoulli_(0.7))
            gradient.mul_(torch.native_dropout(gradient.detach().cos(), 0.5, True)[0])
            gradient.mul_(torch.bernoulli(parameter.detach().sigmoid()) + F.dropout(torch.ones_like(gradient)))

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        weight = self.blocks[1].down.weight
        (nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_, nn.init.zeros_)[batch_idx](weight)
        self.blocks[0].up.weight.data.exponential_().mul_(torch.randint_like(self.blocks[0].up.weight, -3, 3))
        self.blocks[0].up.weight.div_(10)
        if batch_idx == 3:
            weight.copy_(torch.normal(weight, 0.1) + torch.rand_like(weight))


class NoisySteps(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.1).sub_(parameter.grad, alpha=0.1)


class WithNoisySteps(Net):
    def configure_optimizers(self):
        return NoisySteps(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", [slow("zero2"), "zero3", "tensor_parallel", "pipeline"])
def test_random_numbers_are_those_of_the_whole(world2, strategy):
    check_alike(world2, "Redrawn", strategy, "one" if strategy in ("tensor_parallel", "pipeline") else "ddp")
    assert world2.run(number_handlers) == [[]] * 2


@pytest.mark.parametrize("strategy", [slow("zero2"), "zero3", slow("tensor_parallel")])
def test_an_optimizer_draws_for_the_whole(world2, strategy):
    check_alike(world2, "WithNoisySteps", strategy, "one" if strategy == "tensor_parallel" else "ddp")


# -- parameters that are made of other tensors -------------------------------------------------------------------


class Halves(torch.Tensor):
    """A vector that lies in two tensors."""

    @staticmethod
    def __new__(cls, first, second):
        shape = (len(first) + len(second),)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)

    def __init__(self, first, second):
        self.first, self.second = first, second

    def __tensor_flatten__(self):
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Halves(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Halves(args[0].first.detach(), args[0].second.detach())
        whole = [torch.cat([each.first, each.second]) if isinstance(each, Halves) else each for each in args]
        return func(*whole, **(kwargs or {}))


def halves(value):
    return Halves(*(torch.full((500,), value) for _ in range(2)))


def test_what_a_parameter_is_made_of_is_freed_with_it():
    parameter = nn.Parameter(halves(1.0))
    held = [StorageWeakRef(each.untyped_storage()) for each in (parameter.first, parameter.second)]
    empty(parameter)
    assert all(each.expired() for each in held)
    assert parameter.shape == (1000,) and parameter.first.isnan().all() and parameter.second.isnan().all()


def test_what_a_parameter_is_made_of_comes_back_with_it():
    module = nn.Module()
    module.weight = original = nn.Parameter(halves(1.0))
    objects = ParameterObjects(module)
    wrapping = ModuleSnapshot(module, objects)
    module.weight = nn.Parameter(torch.ones(1000))
    objects.settle("zero3")
    wrapping.undo(module, {"weight": halves(2.0)})
    assert module.weight is original and type(original) is Halves and original.requires_grad
    assert torch.equal(original.first, torch.full((500,), 2.0)) and torch.equal(original.second, original.first)
