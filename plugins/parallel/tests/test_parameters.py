"""What a model does with its own parameters is right under every strategy, or refused by name before it trains."""

import gc

import pytest
import torch
from parameter_models import DIVIDED, Net, check_alike, outcome
from tiers import slow
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from torchhal_parallel._module_restore import ModuleSnapshot
from torchhal_parallel._parameter_objects import ParameterObjects, empty

pytestmark = pytest.mark.timeout(120)


def final(name, strategy, devices):
    """The weights of a model of this file after a fit, or (the error's name, its words)."""
    return outcome(globals()[name], strategy, devices)


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


# -- numbers of parameters and gradients -----------------------------------------------------------------------


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
    check_alike(world2, final, "ByNumbers", strategy, reference)
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
    check_alike(world2, final, "AssignsData", strategy, "one" if strategy == "tensor_parallel" else "ddp")
    assert world2.run(number_handlers) == [[]] * 2


# -- random numbers --------------------------------------------------------------------------------------------


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
    check_alike(world2, final, "Redrawn", strategy, "one" if strategy in ("tensor_parallel", "pipeline") else "ddp")
    assert world2.run(number_handlers) == [[]] * 2


@pytest.mark.parametrize("strategy", [slow("zero2"), "zero3", slow("tensor_parallel")])
def test_an_optimizer_draws_for_the_whole(world2, strategy):
    check_alike(world2, final, "WithNoisySteps", strategy, "one" if strategy == "tensor_parallel" else "ddp")


# -- parameters that are made of other tensors -----------------------------------------------------------------


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


def test_inner_tensors_freed_with_parameter():
    """What a parameter is made of is freed with it."""
    parameter = nn.Parameter(halves(1.0))
    held = [StorageWeakRef(each.untyped_storage()) for each in (parameter.first, parameter.second)]
    empty(parameter)
    assert all(each.expired() for each in held)
    assert parameter.shape == (1000,) and parameter.first.isnan().all() and parameter.second.isnan().all()


def test_inner_tensors_restored_with_parameter():
    """What a parameter is made of comes back with it."""
    module = nn.Module()
    module.weight = original = nn.Parameter(halves(1.0))
    objects = ParameterObjects(module)
    wrapping = ModuleSnapshot(module, objects)
    module.weight = nn.Parameter(torch.ones(1000))
    objects.settle("zero3")
    wrapping.restore(module, {"weight": halves(2.0)})
    assert module.weight is original and type(original) is Halves and original.requires_grad
    assert torch.equal(original.first, torch.full((500,), 2.0)) and torch.equal(original.second, original.first)
