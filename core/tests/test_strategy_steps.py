"""Test the steps of single_device and ddp, driven without a Trainer, against plain PyTorch loops."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import hardware
import pytest
import torch
import torch.distributed as dist
from regression import Regression, adam, batches, close, plain, same_everywhere, sgd, share, train
from torch import nn
from torch.nn import functional as F
from world import compose, joined, rank, size

from torchhal.errors import (
    ConfigurationError,
)
from torchhal.resolve import Request, resolve
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("accelerator")]


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


def test_gradient_equals_joined_batch(world):
    """The gradient is that of the joined batch.

    Checks: STR-14.
    """
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
    """Accumulation equals a big batch.

    Nothing is sent for any but the last micro-batch.

    Checks: STR-15.
    """
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
    """Twenty steps equal the plain loop.

    Checks: STR-16, STR-17, STR-18, STR-35, STR-42.
    """
    world.run(twenty_steps, make, clip)


@pytest.mark.parametrize(("make", "clip"), [(sgd, None), (adam, None), (sgd, 0.05)], ids=["sgd", "adam", "clipped"])
def test_single_device_equals_plain_loop(make, clip):
    """Training on a single device equals the plain loop bit for bit."""
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


def test_unused_parameters_refused(world2):
    """Unused parameters are an error that names a way out.

    Checks: STR-20.
    """
    for outcome in world2.outcomes(unused, {}):
        assert outcome.error == "DistributedError", outcome
        assert "'never_used.weight', 'never_used.bias'" in outcome.message
        assert "'ddp_find_unused_parameters_true'" in outcome.message and "requires_grad_(False)" in outcome.message


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_unused_parameters_may_be_allowed(world2, options):
    """Unused parameters may be allowed.

    Checks: STR-20.
    """
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
    """Manual optimization with two optimizers equals the plain loop.

    Through ddp's own hooks it dies with find_unused_parameters, and is silently local without.

    Checks: STR-19.
    """
    world2.run(by_hand, options, every)


def test_manual_optimization_on_three_ranks(world3):
    world3.run(by_hand, {}, 3)


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
