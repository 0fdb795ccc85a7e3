"""single_device and ddp driven by hand, without a Trainer, against plain PyTorch loops."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import os
import subprocess
import sys
import threading
import unittest.mock
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import hardware
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from world import compose, joined, rank, size

from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import TorchElasticEnvironment
from torchhal.distributed import failures
from torchhal.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
    DistributedError,
    ModelError,
)
from torchhal.precision import MixedPrecision, Precision, SinglePrecision, TruePrecision
from torchhal.resolve import Request, resolve
from torchhal.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from torchhal.strategies._forward_through import forward_through

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("accelerator")]


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def same_everywhere(strategy, tensors):
    """Bit for bit the same on all ranks."""
    for name, tensor in tensors.items():
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        everybody = strategy.all_gather(dense)
        for other in everybody[1:]:
            assert torch.equal(everybody[0], other), f"{name} differs between ranks"


# -- models --------------------------------------------------------------------------------------------------


class Regression(nn.Module):
    """A body with dropout-free layers whose loss is a mean: the ranks' mean is the joined batch's loss."""

    def __init__(self, seed=0, extra=False):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        if extra:
            self.never_used = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    validation_step = training_step


class Odd(nn.Module):
    """Every kind of tensor that a broadcast could get wrong."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 4, sparse=hardware.name() == "cpu")  # others may have no sparse tensors
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = nn.Parameter(torch.randn(11, 4))
        self.tied = nn.Linear(4, 11, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(()))
        self.odd = nn.Parameter(torch.randn(7, 13))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.narrow = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0))
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.normal_()
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("cache", torch.randn(2), persistent=False)
        self.register_buffer("spread", torch.randn(1).expand(6))

    def training_step(self, batch, batch_idx):
        hidden = (
            self.norm(self.embed(batch)) * self.scale + self.turned.sum() + self.odd.mean() + self.narrow.sum().float()
        )
        return F.cross_entropy(self.head(hidden) + self.tied(hidden), batch) + self.spread.sum() * 0


def batches(count, per_rank, ranks):
    """``count`` global batches; rank r's share of one is rows r*per_rank to (r+1)*per_rank."""
    generator = torch.Generator().manual_seed(1)
    shape = (count, per_rank * ranks)
    return torch.randn(*shape, 6, generator=generator), torch.randn(*shape, 2, generator=generator)


def share(batch, r, per_rank):
    return tuple(part[r * per_rank : (r + 1) * per_rank] for part in batch)


def plain(model, optimizer, global_batches, *, accumulate=1, clip=None):
    """The loop anybody would write, in one process, on the joined batches."""
    losses = []
    for index, batch in enumerate(zip(*global_batches, strict=True)):
        loss = model.training_step(batch, index)
        losses.append(loss.item())
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train(strategy, model, make_optimizer, global_batches, *, accumulate=1, clip=None):
    """The same loop, every line of it through a strategy."""
    per_rank = global_batches[0].shape[1] // strategy.world_size
    strategy.connect(model)
    strategy.setup_model()
    optimizer = make_optimizer(model.parameters())
    strategy.setup_optimizers([optimizer])
    step = strategy.step_function("training_step")
    paused = strategy.no_backward_sync() or contextlib.nullcontext()
    losses = []
    for index, batch in enumerate(zip(*global_batches, strict=True)):
        last = (index + 1) % accumulate == 0
        mine = strategy.batch_to_device(share(batch, strategy.global_rank, per_rank))
        with contextlib.nullcontext() if last else paused:
            loss = step(mine, index)
            losses.append(strategy.reduce(loss.detach(), "mean").item())
            strategy.backward(loss / accumulate)
        if last:
            if clip is not None:
                strategy.clip_gradients(optimizer, clip)
            assert strategy.optimizer_step(optimizer) is True
            optimizer.zero_grad()
    return losses


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = partial(torch.optim.Adam, lr=0.01, eps=1e-4)

# -- weights ---------------------------------------------------------------------------------------------------


def initial_weights():
    with joined(find_unused_parameters=True) as strategy:
        model, expected = Odd(seed=100 + rank()), Odd(seed=100)
        pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        strategy.connect(model)
        strategy.setup_model()
        assert isinstance(strategy.model, DistributedDataParallel) and strategy.module is model
        for (name, found), wanted in zip(
            [*model.named_parameters(), *model.named_buffers()],
            [*expected.parameters(), *expected.buffers()],
            strict=True,
        ):
            assert found.device == strategy.root_device and torch.equal(found.cpu(), wanted), name
        assert model.tied.weight is model.head.weight and not model.turned.is_contiguous()
        if hardware.name() == "cpu":
            assert pointers == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        # and it trains, the sparse gradient too
        dense = [p for n, p in model.named_parameters() if n != "embed.weight" and p.requires_grad]
        own = torch.optim.SparseAdam if model.embed.sparse else torch.optim.Adam
        strategy.setup_optimizers([torch.optim.SGD(dense, lr=0.1), own([model.embed.weight], lr=0.1)])
        step = strategy.step_function("training_step")
        for index in range(3):
            batch = strategy.batch_to_device(torch.tensor([rank(), 3, 3, 5 + index]))
            strategy.backward(step(batch, index))
            assert model.embed.weight.grad.is_sparse is model.embed.sparse
            for optimizer in strategy.optimizers:
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        same_everywhere(strategy, dict(model.named_parameters()))


def test_every_rank_starts_from_the_weights_of_rank_0(world):
    """STR-13, STR-47: parameters and buffers, tied, frozen, 0-dim, strided, expanded, of several dtypes."""
    world.run(initial_weights)


def unequal_models(kind):
    r = rank()
    model = Regression()
    if kind == "shape":
        model.body[2] = nn.Linear(8, 2 + r)
    elif kind == "name":
        setattr(model, f"extra{r}", nn.Linear(2, 2))
    elif kind == "more":
        model.extra = nn.Linear(2, 2) if r else nn.Identity()
    elif kind == "frozen":
        model.body[0].weight.requires_grad_(not r)
    elif kind == "buffer":
        model.register_buffer("cache", torch.zeros(2 + r), persistent=False)
    elif kind == "lazy":
        model.late = nn.LazyLinear(3)
    with joined() as strategy:
        strategy.connect(model)
        try:
            strategy.setup_model()
        except (DistributedError, ModelError):
            assert strategy.reduce(1, "sum") == size()
            raise


@pytest.mark.parametrize("kind", ["shape", "name", "more", "frozen", "buffer", "lazy"])
def test_unequal_models_fail_on_all_ranks(world2, kind):
    """Alone, torch mixes what doesn't match, or fails on one rank."""
    outcomes = world2.outcomes(unequal_models, kind)
    assert [o.error for o in outcomes] == ["ModelError" if kind == "lazy" else "DistributedError"] * 2, outcomes
    assert outcomes[0].message == outcomes[1].message
    texts = {"shape": "body.2.weight", "name": "extra1", "more": "nothing in its place", "frozen": "body.0.weight",
             "buffer": "cache", "lazy": "'late.weight'"}  # fmt: skip
    assert texts[kind] in outcomes[0].message


def test_a_model_on_the_meta_device_is_refused():
    """STR-41: moving it would be an error of torch's, filling it would train garbage."""
    with torch.device("meta"):
        model = Regression()
    strategy = compose(SingleDeviceStrategy())
    strategy.connect(model)
    with pytest.raises(ModelError, match=r"'body.0.weight', 'body.0.bias', .* and others of Regression .* meta"):
        strategy.setup_model()


def nothing_to_train():
    with joined() as strategy:
        for model in (Regression().requires_grad_(False), nn.Identity(), nn.BatchNorm1d(3, affine=False)):
            strategy.connect(model)
            strategy.setup_model()
            assert strategy.model is strategy.module is model
            with strategy.no_backward_sync():  # which pauses once something is unfrozen and wrapped
                assert strategy.model is model and "require_backward_grad_sync" not in vars(model)
        strategy.connect(model)
        strategy.setup_model(training=False)
        assert strategy.model is model


def test_nothing_to_train_is_not_wrapped(world2):
    """STR-41"""
    world2.run(nothing_to_train)


# -- gradients and steps -----------------------------------------------------------------------------------------


def gradients():
    n, r = size(), rank()
    data = batches(1, 4, n)
    whole = tuple(part[0] for part in data)
    reference = Regression(seed=0)
    reference.training_step(whole, 0).backward()
    with joined() as strategy:
        model = Regression(seed=r)
        strategy.connect(model)
        strategy.setup_model()
        mine = strategy.batch_to_device(share(whole, r, 4))
        loss = strategy.step_function("training_step")(mine, 0)
        strategy.backward(loss)
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            close(parameter.grad, expected.grad)
        same_everywhere(strategy, {n: p.grad for n, p in model.named_parameters()})
        close(strategy.reduce(loss.detach()), reference.training_step(whole, 0).detach())


def test_the_gradient_is_that_of_the_joined_batch(world):
    """STR-14"""
    world.run(gradients)


def accumulation(options):
    n, r = size(), rank()
    data = batches(6, 4, n)
    reference = Regression(seed=0)
    plain(reference, sgd(reference.parameters()), data, accumulate=3)
    calls = []

    def hook(state, bucket):
        calls.append(1)
        return dist.all_reduce(bucket.buffer().div_(n), async_op=True).get_future().then(lambda f: f.value()[0])

    with joined(comm_hook=hook, **options) as strategy:
        model = Regression(seed=r)
        train(strategy, model, sgd, data, accumulate=3)
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            close(parameter, expected)
        same_everywhere(strategy, dict(model.named_parameters()))
    return len(calls)


def test_accumulation_equals_a_big_batch(world):
    """STR-15: and nothing is sent for any but the last micro-batch."""
    assert world.run(accumulation, {}) == [2] * world.size


def test_accumulation_with_a_static_graph(world2):
    """torch asserts inside when its first backward of a static graph is under no_sync: each one is averaged."""
    assert world2.run(accumulation, {"static_graph": True}) == [6, 6]


def twenty_steps(make, clip):
    n, r = size(), rank()
    data = batches(20, 3, n)
    reference = Regression(seed=0)
    expected = plain(reference, make(reference.parameters()), data, clip=clip)
    with joined() as strategy:
        model = Regression(seed=r)
        losses = train(strategy, model, make, data, clip=clip)
        close(torch.tensor(losses), torch.tensor(expected), 2e-6)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            close(found, wanted, 1e-5)
        same_everywhere(strategy, dict(model.named_parameters()))
        again = Regression(seed=r)
        assert losses == train(strategy, again, make, data, clip=clip)
        for first, second in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize(("make", "clip"), [(sgd, None), (adam, None), (sgd, 0.05)], ids=["sgd", "adam", "clipped"])
def test_twenty_steps_equal_the_plain_loop(world, make, clip):
    """STR-16, STR-17, STR-18, STR-35, STR-42"""
    world.run(twenty_steps, make, clip)


@pytest.mark.parametrize(("make", "clip"), [(sgd, None), (adam, None), (sgd, 0.05)], ids=["sgd", "adam", "clipped"])
def test_a_single_device_is_bitwise_the_plain_loop(make, clip):
    data = batches(20, 8, 1)
    reference, model = Regression(), Regression()
    expected = plain(reference, make(reference.parameters()), data, accumulate=2, clip=clip)
    strategy = compose(SingleDeviceStrategy())
    strategy.setup_environment()
    losses = train(strategy, model, make, data, accumulate=2, clip=clip)
    strategy.teardown()
    assert losses == expected
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found, wanted)


def unused(options):
    n, r = size(), rank()
    data = batches(3, 2, n)
    with joined(**options) as strategy:
        model = Regression(seed=r, extra=True)
        try:
            train(strategy, model, sgd, data)
        except RuntimeError as error:
            raise strategy.explain(error) from error
        assert model.never_used.weight.grad is None
        reference = Regression(extra=True)
        plain(reference, sgd(reference.parameters()), data)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            close(found, wanted)


def test_unused_parameters_are_an_error_with_a_way_out(world2):
    """STR-20"""
    for outcome in world2.outcomes(unused, {}):
        assert outcome.error == "DistributedError", outcome
        assert "'never_used.weight', 'never_used.bias'" in outcome.message
        assert "'ddp_find_unused_parameters_true'" in outcome.message and "requires_grad_(False)" in outcome.message


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_unused_parameters_may_be_allowed(world2, options):
    """STR-20"""
    world2.run(unused, options)


def used_on_one_rank():
    n, r = size(), rank()
    with joined(find_unused_parameters=True) as strategy:
        model = Regression(extra=True)

        def training_step(batch, batch_idx):
            output = model(batch[0])
            return F.mse_loss(model.never_used(output) if r == 0 else output, batch[1])

        model.training_step = training_step
        strategy.connect(model)
        strategy.setup_model()
        data = tuple(part[0] for part in batches(1, 2, n))
        mine = strategy.batch_to_device(share(data, r, 2))
        strategy.backward(strategy.step_function("training_step")(mine, 0))
        assert model.never_used.weight.grad.abs().sum() > 0
        same_everywhere(strategy, {name: p.grad for name, p in model.named_parameters()})


def test_a_parameter_used_on_one_rank_only(world3):
    world3.run(used_on_one_rank)


def hooks_and_options():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    n, r = size(), rank()
    data = batches(3, 2, n)
    reference = Regression()
    plain(reference, sgd(reference.parameters()), data)
    for options in ({"comm_hook": fp16_compress_hook}, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}):
        with joined(**options) as strategy:
            model = Regression(seed=r)
            train(strategy, model, sgd, data)
            for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                close(found, wanted, 1e-3)
            same_everywhere(strategy, dict(model.named_parameters()))


def test_communication_hooks_and_ddp_options(world2):
    world2.run(hooks_and_options)


def test_unknown_ddp_options_are_named():
    with pytest.raises(TypeError, match=r"'bucket_cap'.*bucket_cap_mb"):
        DDPStrategy(bucket_cap=1)
    with pytest.raises(TypeError, match="'device_ids'"):
        DDPStrategy(device_ids=[0])
    with pytest.raises(ConfigurationError, match=r"'start_method' must be .* \(got 'thread'\)"):
        DDPStrategy(start_method="thread")
    for timeout in (30, timedelta(0), None):
        with pytest.raises(ConfigurationError, match=r"'timeout' must be a positive datetime\.timedelta"):
            DDPStrategy(timeout=timeout)


# -- manual optimization -----------------------------------------------------------------------------------------


class Adversarial(nn.Module):
    """Two optimizers with their own backward passes, the second through both networks."""

    automatic_optimization = False

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.generator = nn.Linear(6, 2)
        self.critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        self.backward = lambda loss: loss.backward()
        self.optimizers = []
        self.every = 1

    def make_optimizers(self):
        self.optimizers = [sgd(self.generator.parameters()), sgd(self.critic.parameters())]
        return self.optimizers

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers
        last = (batch_idx + 1) % self.every == 0
        self.backward(((self.critic(self.generator(x).detach()) - 1) ** 2).mean() + (self.critic(y) ** 2).mean())
        if last:
            second.step()
            second.zero_grad()
        self.backward((self.critic(self.generator(x)) ** 2).mean())
        if last:
            first.step()
            first.zero_grad()
            second.zero_grad()


def by_hand(options, every):
    n, r = size(), rank()
    data = batches(6, 4, n)
    reference = Adversarial()
    reference.make_optimizers()
    reference.every = every
    for index, batch in enumerate(zip(*data, strict=True)):
        reference.training_step(batch, index)
    with joined(**options) as strategy:
        model = Adversarial(seed=r)
        model.every = every
        model.backward = strategy.manual_backward
        strategy.connect(model)
        strategy.setup_model()
        strategy.setup_optimizers(model.make_optimizers())
        step = strategy.step_function("training_step")
        for index, batch in enumerate(zip(*data, strict=True)):
            step(strategy.batch_to_device(share(batch, r, 4)), index)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            close(found, wanted, 2e-6)
        same_everywhere(strategy, dict(model.named_parameters()))


@pytest.mark.parametrize("every", [1, 3], ids=["each batch", "accumulating"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_manual_optimization(world2, options, every):
    """STR-19: through ddp's own hooks it dies with find_unused_parameters, and is silently local without."""
    world2.run(by_hand, options, every)


def test_manual_optimization_on_three_ranks(world3):
    world3.run(by_hand, {}, 3)


# -- the module's own face ---------------------------------------------------------------------------------------


class Curious(Regression):
    """Looks at itself while it is called through a wrapper."""

    def forward(self, x):
        assert self.training_step.__func__ is Curious.training_step
        return super().forward(x)

    def training_step(self, batch, batch_idx):
        assert "forward" not in self.__dict__
        first, second = self(batch[0]), self.forward(batch[0])
        assert torch.equal(first, second)
        return F.mse_loss(first, batch[1])


def own_face():
    data = batches(2, 2, size())
    with joined() as strategy:
        model = Curious()
        names = list(model.state_dict())
        train(strategy, model, sgd, data)
        assert list(strategy.module_state_dict()) == names  # no "module."
        assert model.forward.__func__ is Curious.forward
        other = Curious(seed=5)
        strategy.load_module_state_dict(other.state_dict())
        assert torch.equal(model.body[0].weight.cpu(), other.body[0].weight)

        def failing(batch, batch_idx):
            raise ValueError("boom")

        model.training_step = failing
        step = strategy.step_function("training_step")
        for _ in range(2):
            try:
                step((torch.ones(2, 6), None), 0)
            except ValueError as error:
                assert str(error) == "boom"
            else:
                raise AssertionError("no error")
            assert "forward" not in model.__dict__
        # a forward that the user set on the object stays the user's
        model.__dict__["forward"] = mine = model.body.forward
        del model.__dict__["training_step"]
        model.training_step = lambda batch, batch_idx: F.mse_loss(model(batch[0]), batch[1])
        batch = strategy.batch_to_device((torch.ones(2, 6), torch.ones(2, 2)))
        strategy.step_function("training_step")(batch, 0)
        assert model.__dict__["forward"] is mine


def test_the_module_is_itself_inside_the_step(world2):
    """STR-21"""
    world2.run(own_face)


class Wrapper(nn.Module):
    """Hooks the module that it wraps, as torch's wrapper does for its mixed precision."""

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, []
        self.handle = module.register_forward_pre_hook(self.before)

    def before(self, module, inputs):
        self.calls.append(len(inputs))

    def forward(self, *args):
        return self.module(*args)


@pytest.mark.parametrize("global_hooks", [False, True])
def test_the_modules_hooks_are_those_of_its_own_forward(global_hooks):
    """The wrapper's belong to its call, which runs the step."""
    seen = []

    def training_step(batch, batch_idx):
        seen.append("step")
        late = model.register_forward_hook(lambda module, inputs, output: seen.append("late"))
        output = model(batch)
        late.remove()
        if batch_idx == 1:
            raise ValueError("boom")
        return output

    class Line(nn.Linear):
        pass

    model = Line(2, 1)
    handles = [
        model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs)) or (inputs[0] * 0,)),
        model.register_forward_hook(lambda module, inputs, output: seen.append("after") or output + 1),
        model.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward")),
    ]
    wrapper = Wrapper(model)
    step = forward_through(SimpleNamespace(model=wrapper), model, training_step)
    if global_hooks:
        handles.append(nn.modules.module.register_module_forward_hook(lambda *_: None))
    expected = ["step", 1, "after", "late"]
    output = step(torch.ones(3, 2), 0)
    assert seen == expected and wrapper.calls == [2, 1]
    assert torch.equal(output, (model.bias + 1).expand(3, 1))
    output.sum().backward()
    assert seen == [*expected, "backward"]
    with pytest.raises(ValueError, match="boom"):
        step(torch.ones(3, 2), 1)
    assert seen[5:] == expected and "forward" not in vars(model)
    for handle in (*handles, wrapper.handle):
        handle.remove()
    assert not any(vars(model)[name] for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"))


def batch_norm():
    r = rank()
    with joined() as strategy:
        torch.manual_seed(r)
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        model.training_step = lambda batch, batch_idx: model(batch).sum()
        model.register_buffer("scratch", torch.zeros(2), persistent=False)
        model.register_buffer("grown", torch.zeros(2))
        strategy.connect(model)
        strategy.setup_model()
        batch = strategy.batch_to_device(torch.randn(8, 4) + 10 * r)
        strategy.backward(strategy.step_function("training_step")(batch, 0))
        mine = model[0].running_mean.clone()
        first, second = strategy.all_gather(mine)[:2]
        assert not torch.equal(first, second)  # each rank's own data
        model.scratch = torch.zeros(3 + r)  # a cache grows with what a rank has seen
        model.grown = torch.zeros(3 + r)
        state = strategy.module_state_dict()
        assert torch.equal(state["0.running_mean"], strategy.all_gather(mine)[0])
        assert "scratch" not in state and state["grown"].shape == (3 + r,)
        assert torch.equal(model[0].running_mean, mine)  # saving changes nothing
        assert state["1.weight"].data_ptr() == model[1].weight.data_ptr()  # and copies no weights


def test_buffers_are_saved_from_rank_0(world):
    """A batch norm's statistics differ between ranks after a step."""
    world.run(batch_norm)


# -- precision ---------------------------------------------------------------------------------------------------


WATCHED = {
    "setup", "convert_module", "convert_input", "convert_output", "forward_context", "backward", "unscale_gradients",
    "clip_gradients", "optimizer_step", "check_optimizer", "teardown",
}  # fmt: skip


class Spy(Precision):
    """Writes down what it is asked for."""

    alias = "spy"

    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name in WATCHED:
            self.calls.append(name)
        return super().__getattribute__(name)

    def convert_input(self, batch):
        return tuple(part * 1 for part in batch)

    def convert_output(self, output):
        return output

    def forward_context(self):
        return contextlib.nullcontext()


@pytest.mark.parametrize("cls", [SingleDeviceStrategy, DDPStrategy])
def test_the_given_precision_is_called(cls, monkeypatch):
    """STR-36"""
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    spy = Spy()
    strategy = compose(cls(), precision=spy)
    assert strategy.precision_plugin is strategy.precision is spy
    strategy.setup_environment()
    spy.calls.clear()
    train(strategy, Regression(), sgd, batches(1, 4, 1), clip=1.0)
    strategy.teardown()
    seen = list(dict.fromkeys(spy.calls))
    assert WATCHED - {"setup"} <= set(seen), seen
    assert seen.index("convert_module") < seen.index("backward") < seen.index("optimizer_step") < seen.index("teardown")


def half_precision():
    n, r = size(), rank()
    data = batches(5, 4, n)
    reference = Regression()
    optimizer = sgd(reference.parameters())
    for batch in zip(*data, strict=True):
        with torch.autocast(hardware.name(), torch.bfloat16):
            loss = reference.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy = compose(DDPStrategy(), precision=MixedPrecision("bfloat16"))
    strategy.setup_environment()
    try:
        model = Regression(seed=r)
        train(strategy, model, sgd, data)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert found.dtype is torch.float32
            close(found, wanted, 5e-3)
        same_everywhere(strategy, dict(model.named_parameters()))
        strategy.teardown()
        strategy = compose(DDPStrategy(), precision=TruePrecision("float64"))
        strategy.setup_environment()
        reference, model = Regression().double(), Regression(seed=r)
        plain(reference, sgd(reference.parameters()), [part.double() for part in data])
        train(strategy, model, sgd, data)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            close(found, wanted, 1e-12)
    finally:
        strategy.teardown()


def test_other_precisions_under_ddp(world2):
    """STR-36"""
    world2.run(half_precision)


# -- life cycle --------------------------------------------------------------------------------------------------


def ranks_and_devices():
    r, n = rank(), size()
    strategy = compose(DDPStrategy())
    strategy.devices = [torch.device("meta", index) for index in range(n)]
    before = (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size)
    assert before == (r, r, 0, n) and strategy.is_global_zero == (r == 0)
    assert strategy.root_device == torch.device("meta", r)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": n, "rank": r}
    assert not dist.is_initialized()
    with joined() as strategy:
        assert before == (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size)
        assert strategy.reduce(int(strategy.is_global_zero), "sum") == 1
        data = torch.utils.data.DistributedSampler(range(10), **strategy.distributed_sampler_kwargs, shuffle=True)
        first = strategy.all_gather_object(list(data))
        data.set_epoch(1)
        assert strategy.all_gather_object(list(data)) != first  # another order
        indices = [index for part in first for index in part]
        assert set(indices) == set(range(10)) and len(indices) == -(-10 // n) * n  # padded with repetitions


def test_ranks_devices_and_shares(world):
    """STR-12, STR-27, STR-28"""
    world.run(ranks_and_devices)


def rank_prefixes():
    """How often an uncaught error's lines would say which rank they are of."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error), unittest.mock.patch.object(failures, "uncaught", []):  # nobody is told
        sys.excepthook(ValueError, ValueError("here"), None)
    return error.getvalue().count(f"[rank{rank()}]")


def lives():
    sgd([torch.ones(1, requires_grad=True)]).step()  # imports what torch imports late, and the variables that sets
    environment, threads, torch_threads = dict(os.environ), threading.active_count(), torch.get_num_threads()
    strategy = compose(DDPStrategy(timeout=timedelta(seconds=20)))
    strategy.teardown()  # before any set-up
    model, prefixes = Regression(seed=rank()), []
    for _ in range(3):
        assert not strategy.is_set_up
        strategy.setup_environment()
        strategy.setup_environment()  # idempotent within a life
        assert dist.is_initialized() and strategy.is_set_up
        prefixes.append(rank_prefixes())
        assert train(strategy, model, sgd, batches(2, 2, size()))
        strategy.barrier("end")
        strategy.teardown()
        strategy.teardown()
        assert not dist.is_initialized() and strategy.model is strategy.module is model
    assert prefixes[0] == prefixes[1] == prefixes[2], prefixes
    assert threading.active_count() == threads and torch.get_num_threads() == torch_threads
    assert set(os.environ.items()) ^ set(environment.items()) == set()


def test_set_up_and_teardown_as_often_as_one_likes(world):
    """STR-29, STR-31"""
    world.run(lives)


def wrapper_outlives_the_group():
    for _ in range(15):
        with joined() as strategy:
            train(strategy, Regression(), sgd, batches(1, 2, size()))
            wrapper = strategy.model
            strategy.all_gather_object("the group's thread is still letting go of this")
        assert isinstance(wrapper, DistributedDataParallel)
        del wrapper, strategy


def test_a_wrapper_may_outlive_its_process_group(world3):
    """Freed last and under the GIL, the group would wait for a thread of its own that waits for the GIL."""
    world3.run(wrapper_outlives_the_group, timeout=60)


def failing_setup(where):
    class Failing(type(hardware.accelerator())):
        def setup_device(self, device):
            if where == "device":
                raise ValueError("boom in device")

    class FailingPrecision(SinglePrecision):
        def setup(self, accelerator, device):
            if where == "precision":
                raise ValueError("boom in precision")

        def convert_module(self, module):
            if where == "model":
                raise ValueError("boom in model")
            return module

    strategy = compose(DDPStrategy(timeout=timedelta(seconds=20)))
    strategy._accelerator, strategy._precision = Failing(), FailingPrecision()
    try:
        strategy.setup_environment()
        strategy.connect(Regression())
        strategy.setup_model()
    except ValueError as error:
        assert str(error) == f"boom in {where}"
    else:
        raise AssertionError("no error")
    finally:
        strategy.teardown()
        strategy.teardown()
    assert not dist.is_initialized() and not strategy.is_set_up
    with joined() as strategy:  # and the next life is a good one
        assert strategy.reduce(1, "sum") == size()


@pytest.mark.parametrize("where", ["device", "precision", "model"])
def test_teardown_after_a_failed_set_up(world2, where):
    """STR-30"""
    world2.run(failing_setup, where)


def rendezvous_fails():
    strategy = compose(DDPStrategy(timeout=timedelta(seconds=1.5)))
    if rank() == 0:
        try:
            strategy.setup_environment()
        except DistributedError as error:
            assert "rank 1" in str(error), error
        else:
            raise AssertionError("rank 1 never came")
        assert not strategy.is_set_up  # so that another try tries
        strategy.teardown()


def test_a_rank_that_never_comes_is_named(world2):
    world2.run(rendezvous_fails)
    world2.stop()  # the ranks have counted different lives


def teardown_of_a_broken_part():
    class Broken(SinglePrecision):
        def teardown(self):
            raise ValueError("precision is stuck")

    strategy = compose(DDPStrategy(), precision=Broken())
    strategy.setup_environment()
    strategy.connect(Regression())
    strategy.setup_model()
    try:
        strategy.teardown()
    except ValueError as error:
        assert str(error) == "precision is stuck"
    else:
        raise AssertionError("the error is swallowed")
    assert not dist.is_initialized() and strategy.model is strategy.module


def test_a_part_that_fails_in_teardown_keeps_nothing_alive(world2):
    world2.run(teardown_of_a_broken_part)


def foreign_group():
    r, n = rank(), size()
    host = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    store = dist.PrefixStore(f"foreign/{hardware.name()}", host)  # the other accelerator's test has left its keys
    backend = "gloo" if hardware.name() == "cpu" else f"cpu:gloo,{hardware.name()}:{hardware.accelerator().backend}"
    dist.init_process_group(backend, store=store, rank=r, world_size=n)
    mine = dist.group.WORLD
    try:
        for _ in range(2):  # what the first life left in the store must not disturb the second
            with joined() as strategy:
                assert dist.group.WORLD is mine
                strategy.barrier("first")
                assert strategy.reduce(1, "sum") == n
                train(strategy, Regression(seed=r), sgd, batches(2, 2, n))
                strategy.barrier("last")
            assert dist.is_initialized() and dist.group.WORLD is mine
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == n
    finally:
        dist.destroy_process_group()


def test_a_foreign_process_group_is_used_and_left_alone(world):
    """STR-39"""
    world.run(foreign_group)


def foreign_group_of_another_size():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with joined():
            pass
    finally:
        dist.destroy_process_group()


def test_a_foreign_process_group_that_does_not_match(world2):
    for index, outcome in enumerate(world2.outcomes(foreign_group_of_another_size)):
        assert outcome.error == "ConfigurationError", outcome
        assert "a process group of 1" in outcome.message and f"rank {index} of 2" in outcome.message


def foreign_group_for_other_devices():
    host = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    store = dist.PrefixStore(f"foreign/other/{hardware.name()}", host)
    dist.init_process_group("gloo", store=store, rank=rank(), world_size=size())
    dist.barrier()  # whoever destroys the group while another rank still connects ends it with gloo's error
    try:
        with joined() as strategy:
            assert strategy.reduce(1, "sum") == size()
    finally:
        dist.destroy_process_group()


def test_a_foreign_process_group_for_other_devices(world2, accelerator):
    """Where torch itself might hang."""
    for outcome in world2.outcomes(foreign_group_for_other_devices):
        if accelerator == "cpu":
            assert not outcome.error, outcome
        else:
            assert outcome.error == "ConfigurationError", outcome
            assert f"make it with backend='cpu:gloo,{accelerator}:" in outcome.message


def options_of_the_group():
    strategy = compose(DDPStrategy(timeout=timedelta(seconds=33), process_group_backend="cpu:gloo"))
    strategy.setup_environment()
    try:
        assert dist.get_backend() == "gloo" or "gloo" in dist.get_backend_config()
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    finally:
        strategy.teardown()


def test_backend_and_timeout_are_honoured(world2):
    """STR-39"""
    assert world2.run(options_of_the_group) == [33.0, 33.0]


def one_batch_more():
    r = rank()
    strategy = compose(DDPStrategy(timeout=timedelta(seconds=4)))
    strategy.setup_environment()
    try:
        model = Regression()
        strategy.connect(model)
        strategy.setup_model()
        step = strategy.step_function("training_step")
        for _ in range(3 if r == 0 else 2):
            strategy.backward(step(strategy.batch_to_device((torch.ones(2, 6), torch.ones(2, 2))), 0))
        strategy.barrier("end of training")
    except Exception as error:
        raised = strategy.explain(error)
        strategy.watch.report_failure(raised)
        raise raised from error
    finally:
        strategy.teardown()


@pytest.mark.slow
def test_a_rank_with_a_batch_more_ends_on_all_ranks(world2):
    """STR-48: within the timeout, on all ranks, whoever waits for whom."""
    outcomes = world2.outcomes(one_batch_more, timeout=60)
    assert all(outcome.error for outcome in outcomes), outcomes
    world2.stop()


def test_nothing_communicates_before_the_set_up():
    """STR-38: all of this on one rank alone, in a world of three whose others don't exist."""
    strategy = DDPStrategy()
    strategy.configure(
        accelerator=CPUAccelerator(), precision=SinglePrecision(), checkpoint_io=TorchCheckpointIO(),
        cluster_environment=TorchElasticEnvironment(), devices=[torch.device("cpu")] * 3, num_nodes=1,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": 1,
            "LOCAL_RANK": 1,
            "WORLD_SIZE": 3,
            "GROUP_RANK": 0,
            "LOCAL_WORLD_SIZE": 3,
        }.items():
            patch.setenv(name, str(value))
        model = Regression()
        strategy.connect(model)
        with strategy.init_context():
            nn.Linear(2, 2)
        assert (strategy.global_rank, strategy.world_size, strategy.is_global_zero) == (1, 3, False)
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 3, "rank": 1}
        assert strategy.root_device == torch.device("cpu") and strategy.batch_to_device([1]) == [1]
        strategy.setup_optimizers([sgd(model.parameters())])
        strategy.optimizer_state(strategy.optimizers[0])
        strategy.teardown()


def test_an_object_without_parts_says_what_is_missing():
    strategy = DDPStrategy()
    for name in ("accelerator", "precision", "checkpoint_io"):
        with pytest.raises(ConfigurationError, match=f"DDPStrategy has no {name} yet"):
            getattr(strategy, name)
    with pytest.raises(ConfigurationError, match="DDPStrategy has no devices yet"):
        strategy.root_device  # noqa: B018
    assert strategy.is_global_zero and strategy.world_size == 1
    strategy.teardown()
    with pytest.raises(TypeError, match="abstract"):
        ParallelStrategy.__base__()
    assert ParallelStrategy.__base__ is Strategy


# -- checkpoints -------------------------------------------------------------------------------------------------


class SpyIO(TorchCheckpointIO):
    def __init__(self):
        super().__init__()
        self.calls = []

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        self.calls.append(("save", storage_options))
        if checkpoint.get("fail"):
            raise OSError("no space left")

    def load_checkpoint(self, path, *, map_location=None, weights_only=True):
        self.calls.append(("load", str(map_location), weights_only))
        return {}

    def remove_checkpoint(self, path):
        self.calls.append(("remove", path))
        if path == "busy":
            raise OSError("in use")


def through_the_io():
    r = rank()
    with joined() as strategy:
        strategy.checkpoint_io = spy = SpyIO()
        strategy.save_checkpoint({}, "somewhere", storage_options={"key": 1})
        strategy.load_checkpoint("somewhere", weights_only=False)
        strategy.remove_checkpoint("somewhere")
        load = ("load", "cpu", False)
        assert spy.calls == ([("save", {"key": 1}), load, ("remove", "somewhere")] if r == 0 else [load]), spy.calls
        try:
            strategy.save_checkpoint({"fail": True}, "somewhere")
        except OSError as error:
            assert r == 0 and "no space left" in str(error)
        except CheckpointError as error:
            assert r != 0 and "'somewhere' was not written: rank 0: OSError: no space left" in str(error)
        else:
            raise AssertionError(f"rank {r} thinks that it was saved")
        try:
            strategy.remove_checkpoint("busy")
        except OSError as error:
            assert r == 0 and "in use" in str(error)
        except CheckpointError as error:
            assert r != 0 and "'busy' was not removed: rank 0: OSError: in use" in str(error)
        else:
            raise AssertionError(f"rank {r} thinks that it was removed")


def test_checkpoints_go_through_the_given_io(world):
    """STR-24: on rank 0, and its failure is everybody's."""
    world.run(through_the_io)


def test_state_of_another_model_is_refused():
    """STR-25, STR-26"""
    strategy = compose(SingleDeviceStrategy())
    model = Regression()
    strategy.connect(model)
    strategy.setup_model()
    state = copy.deepcopy(strategy.module_state_dict())
    state["body.9.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointMismatchError, match=r"(?s)Regression.*body.9.weight"):
        strategy.load_module_state_dict(state)
    result = strategy.load_module_state_dict(state, strict=False)
    assert result.unexpected_keys == ["body.9.weight"]
    state = Regression().state_dict()
    state["body.0.weight"] = torch.zeros(1, 2)
    with pytest.raises(CheckpointMismatchError, match=r"(?s)body.0.weight.*\[1, 2\]"):
        strategy.load_module_state_dict(state, strict=False)
    optimizer = adam(model.parameters())
    with pytest.raises(CheckpointMismatchError, match="Adam"):
        strategy.load_optimizer_state(optimizer, sgd([model.body[0].weight]).state_dict())


def gradients_in_the_midst():
    """A checkpoint between two micro-batches: what was accumulated is the same on all ranks, and goes on right."""
    n, r = size(), rank()
    data = batches(2, 4, n)
    reference = Regression()
    plain(reference, sgd(reference.parameters()), data, accumulate=2)
    with joined() as strategy:
        model = Regression()
        strategy.connect(model)
        strategy.setup_model()
        optimizer = sgd(model.parameters())
        strategy.setup_optimizers([optimizer])
        step = strategy.step_function("training_step")
        first, second = (strategy.batch_to_device(share(batch, r, 4)) for batch in zip(*data, strict=True))
        with strategy.no_backward_sync():
            strategy.backward(step(first, 0) / 2)
        saved = {name: gradient.clone() for name, gradient in strategy.accumulated_gradients().items()}
        same_everywhere(strategy, saved)
        optimizer.zero_grad()
        strategy.load_accumulated_gradients(saved)
        strategy.backward(step(second, 1) / 2)
        strategy.optimizer_step(optimizer)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            close(found, wanted)


def test_accumulated_gradients_are_saved_and_continued(world):
    """STR-22"""
    world.run(gradients_in_the_midst)


# -- without a Trainer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "devices"), [("single_device", 1), ("ddp", 1), ("ddp", 2), ("ddp_spawn", 2)])
def test_a_loop_without_a_trainer(tmp_path, name, devices):
    """The documented way, in a script: resolve, launch, set up, step, tear down."""
    script = Path(__file__).parent / "scripts" / "raw_loop.py"
    spec = importlib.util.spec_from_file_location("raw_loop", script)
    raw_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(raw_loop)
    model = raw_loop.Net(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for batch in raw_loop.data():
        loss = model.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    if devices == 1:
        strategy = resolve(Request(accelerator=hardware.name(), strategy=name, devices=1)).build()
        losses = strategy.make_launcher().launch(raw_loop.train, strategy, str(tmp_path))
        assert losses == expected and not dist.is_initialized()
    else:
        command = [sys.executable, str(script), str(tmp_path), name, str(devices)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for rank_ in range(devices):
        result = torch.load(tmp_path / f"rank{rank_}.pt")
        close(torch.tensor(result["losses"]), torch.tensor(expected))
        for key, value in model.state_dict().items():
            close(result["state"][key], value)


def test_a_wrapper_that_a_precision_has_connected_stays_when_parameters_are_idle(world2):
    world2.run(idle_when_connected)


def idle_when_connected():
    with joined(find_unused_parameters=True) as strategy:
        strategy.connect(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        strategy.setup_model()
        wrapper, strategy.model_is_connected = strategy.model, True
        strategy.module[0].requires_grad_(False)
        for _ in range(3):
            strategy.begin_epoch()
        assert strategy.model is wrapper
