"""Test the loss scaling of float16: gradients, clipping, skipped steps, saved state and several optimizers.

Ids such as PRE-10 in comments are those of the conformance checks.
"""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import hardware
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision_loops import (
    OPTIMIZERS,
    data,
    half_gradients,
    loss_of,
    make,
    net,
    run,
    same_parameters,
    scaled_backward,
    scaling,
    vector,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchhal.errors import CheckpointMismatchError
from torchhal.precision import MixedPrecision, Precision

pytestmark = pytest.mark.usefixtures("accelerator", "precision_state")


def test_gradients_are_scaled_once_and_unscaled_once() -> None:  # PRE-09, PRE-12
    precision, model, (batch,) = scaling(2.0**10), net(), data(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reference = half_gradients(model, batch)
    scaled_backward(precision, model, batch)
    for p, gradient in zip(model.parameters(), reference, strict=True):
        assert torch.equal(p.grad, gradient * 2.0**10)
    for _ in range(3):
        precision.unscale_gradients(optimizer)
        for p, gradient in zip(model.parameters(), reference, strict=True):
            assert torch.equal(p.grad, gradient)
    before = vector(model)
    assert precision.optimizer_step(optimizer) is True
    torch.testing.assert_close(before - vector(model), torch.cat([g.flatten() for g in reference]))
    precision.unscale_gradients(optimizer)  # logged after the step: still at true size
    for p, gradient in zip(model.parameters(), reference, strict=True):
        assert torch.equal(p.grad, gradient)


@settings(max_examples=25, deadline=None)
@given(
    limit=st.floats(1e-4, 10.0),
    exponent=st.integers(0, 14),
    unscale_first=st.booleans(),
    alias=st.sampled_from(["16-mixed", "bf16-mixed", "32-true"]),
)
def test_clip_by_norm_bounds_the_update(limit: float, exponent: int, unscale_first: bool, alias: str) -> None:  # PRE-10
    precision = scaling(2.0**exponent) if alias == "16-mixed" else make(alias)
    model, (batch,) = net(), data(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = vector(model)
    scaled_backward(precision, model, batch)
    if unscale_first:
        precision.unscale_gradients(optimizer)
        precision.unscale_gradients(optimizer)
    norm = precision.clip_gradients(optimizer, limit)
    precision.optimizer_step(optimizer)
    update = (before - vector(model)).norm()
    true = torch.cat([g.flatten() for g in half_gradients(net(), batch)]).norm()
    assert norm is not None
    torch.testing.assert_close(norm, true, rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(update, torch.minimum(norm, torch.tensor(limit)), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("alias", ["16-mixed", "bf16-mixed", "32-true"])
def test_clip_by_value_and_unknown_algorithms(alias: str) -> None:  # PRE-11
    precision, (batch,) = make(alias), data(1)
    updates = {}
    for algorithm in ("value", "norm"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = vector(model)
        scaled_backward(precision, model, batch)
        result = precision.clip_gradients(optimizer, 0.05, algorithm)
        assert (result is None) == (algorithm == "value")
        precision.optimizer_step(optimizer)
        updates[algorithm] = before - vector(model)
    assert updates["value"].abs().max().item() == pytest.approx(0.05, abs=1e-6)
    assert updates["value"].norm() > 0.06
    assert updates["norm"].norm().item() == pytest.approx(0.05, abs=1e-5)
    with pytest.raises(ValueError, match=r"'algorithm' must be 'norm' or 'value' \(got 'inf'\)"):
        Precision().clip_gradients(optimizer, 1.0, "inf")


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nonfinite_step_is_skipped(kind: str, clip: float | None, bad: float) -> None:  # PRE-13, PRE-14
    """A step with gradients that are not finite is left out and reported."""
    precision, model, (first, second, third) = scaling(2.0**10), net(), data(3)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step on the instance
    counted = optimizer.step
    reference = net()
    other = OPTIMIZERS[kind](reference.parameters())

    def one(batch: Any, factor: float = 1.0) -> bool:
        optimizer.zero_grad()
        scaled_backward(precision, model, batch, factor)
        if clip is not None:
            precision.clip_gradients(optimizer, clip)
        return precision.optimizer_step(optimizer)

    assert one(first) is True
    kept, state = vector(model), copy.deepcopy(optimizer.state_dict()["state"])
    assert one(second, bad) is False
    assert torch.equal(kept, vector(model))
    assert repr(optimizer.state_dict()["state"]) == repr(state)
    assert precision.state_dict()["scale"] == 2.0**9
    assert one(third) is True
    assert not torch.equal(kept, vector(model))
    assert optimizer.step == counted
    assert not hasattr(optimizer, "found_inf")
    scheduler.step()

    scaler = torch.amp.GradScaler(hardware.name(), init_scale=2.0**9)
    for batch in (first, third):  # as if the bad one had never been
        other.zero_grad()
        with torch.autocast(hardware.name(), torch.float16):
            loss = loss_of(reference, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(other)
        if clip is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        scaler.step(other)
        scaler.update()
    torch.testing.assert_close(vector(model), vector(reference), rtol=1e-4, atol=1e-5)


class Waits(TorchDispatchMode):
    """Counts the reads of a tensor's value by the host: each is a wait on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
def test_a_step_waits_for_the_device_once(kind: str) -> None:
    precision, model, batches = scaling(), net(), data(4)
    optimizer = OPTIMIZERS[kind](model.parameters())
    run(precision, model, optimizer, batches[:1])
    with Waits() as waits:
        run(precision, model, optimizer, batches[1:])
    assert waits.count == 3


def test_accumulation_updates_scale_once() -> None:  # PRE-15
    """Micro-batches make one big step and one update of the scale."""
    (whole,) = data(1, rows=32)
    big, small = net(), net()
    one, many = scaling(), scaling()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (big, small)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaled_backward(one, big, whole)
        one.optimizer_step(optimizers[0])
        for x, y in zip(whole[0].chunk(4), whole[1].chunk(4), strict=True):
            scaled_backward(many, small, (x, y), 0.25)
        many.optimizer_step(optimizers[1])
    torch.testing.assert_close(vector(big), vector(small), rtol=1e-3, atol=1e-4)
    assert many.state_dict() == one.state_dict()
    assert many.state_dict()["_growth_tracker"] == 3


def test_the_state_continues_bit_for_bit() -> None:  # PRE-16, PRE-17
    options = {"init_scale": 2.0**12, "growth_interval": 3, "growth_factor": 1.7, "backoff_factor": 0.3}
    batches, factors = data(12), [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, float("nan"), 1.0, 1.0]

    def train(precision: MixedPrecision, model: nn.Module, optimizer: Any, span: range) -> list[Any]:
        seen = []
        for index in span:
            optimizer.zero_grad()
            scaled_backward(precision, model, batches[index], factors[index])
            seen.append((precision.optimizer_step(optimizer), precision.state_dict()))
        return seen

    straight, model = scaling(**options), net()
    adam = torch.optim.Adam(model.parameters())
    expected = train(straight, model, adam, range(12))
    assert [taken for taken, _ in expected].count(False) == 2
    assert len({state["scale"] for _, state in expected}) > 3

    for cut in (0, 2, 3, 5, 10):
        first, part = scaling(**options), net()
        optimizer = torch.optim.Adam(part.parameters())
        seen = train(first, part, optimizer, range(cut))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert json.loads(json.dumps(state)) == state
        for second in (MixedPrecision("float16"), make("16-mixed"), scaling(3.0)):
            continued, rest = copy.deepcopy((part, optimizer))
            second.load_state_dict(state)  # before or after setup
            second.setup(hardware.accelerator(), hardware.device())
            assert second.state_dict() == state
            assert seen + train(second, continued, rest, range(cut, 12)) == expected
            assert same_parameters(continued, model)


def test_a_used_scaler_takes_a_state_too() -> None:
    precision, model = scaling(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaled_backward(precision, model, data(1)[0])
    precision.unscale_gradients(optimizer)  # a step left open must not survive the load
    state = {**precision.state_dict(), "scale": 8.0, "_growth_tracker": 5}
    precision.load_state_dict(state)
    assert precision.state_dict() == state
    optimizer.zero_grad()
    before = vector(model)
    scaled_backward(precision, model, data(1)[0])
    precision.clip_gradients(optimizer, 0.01)
    assert precision.optimizer_step(optimizer)
    assert (vector(model) - before).norm().item() == pytest.approx(0.001, rel=1e-3)


def test_states_of_something_else() -> None:
    precision = make("16-mixed")
    before = precision.state_dict()
    precision.load_state_dict({})  # of a run that scaled nothing
    assert precision.state_dict() == before
    for target in (precision, MixedPrecision("float16")):
        with pytest.raises(CheckpointMismatchError, match=r"'16-mixed': it lacks .*'_growth_tracker'"):
            target.load_state_dict({"scale": 1.0})
    bf16 = make("bf16-mixed")
    bf16.load_state_dict(before)
    assert bf16.state_dict() == {}


def test_scale_survives_teardown() -> None:  # PRE-24
    """A second set-up keeps the scale, and teardown forgets a step that was left open."""
    precision, model, batches = make("16-mixed"), net(), data(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaled_backward(precision, model, batches[0], float("inf"))
    assert not precision.optimizer_step(optimizer)
    optimizer.zero_grad()
    scaled_backward(precision, model, batches[1])
    precision.unscale_gradients(optimizer)  # and then the run ended, with the gradients still there
    scaler = precision.scaler
    precision.teardown()
    precision.teardown()
    precision.setup(hardware.accelerator(), hardware.device())
    assert precision.scaler is scaler
    assert precision.state_dict()["scale"] == 2.0**15

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(precision, model, optimizer, batches, clip=0.5)
    assert precision.state_dict()["_growth_tracker"] == 4


def two_nets() -> tuple[nn.Module, nn.Module, Any, Any]:
    a, b = net(), net()
    return a, b, torch.optim.SGD(a.parameters(), lr=1.0), torch.optim.SGD(b.parameters(), lr=1.0)


@pytest.mark.parametrize("order", ["together", "one after the other", "unscaled early"])
@pytest.mark.parametrize("bad", [None, "first", "second", "both"])
def test_two_optimizers_do_not_disturb_each_other(order: str, bad: str | None) -> None:  # PRE-21
    precision = scaling(2.0**4, growth_interval=1)  # every good step changes the scale: any mix-up shows
    a, b, first, second = two_nets()
    for batch in data(4):
        expected = [half_gradients(model, batch) for model in (a, b)]
        before = vector(a), vector(b)
        factors = [float("inf") if bad in (name, "both") else 1.0 for name in ("first", "second")]
        first.zero_grad()
        second.zero_grad()
        if order == "one after the other":
            scaled_backward(precision, a, batch, factors[0])
            taken = [precision.optimizer_step(first)]
            scaled_backward(precision, b, batch, factors[1])
            taken.append(precision.optimizer_step(second))
        else:
            scaled_backward(precision, a, batch, factors[0])
            if order == "unscaled early":
                precision.clip_gradients(first, 1e9)
            scaled_backward(precision, b, batch, factors[1])
            taken = [precision.optimizer_step(first), precision.optimizer_step(second)]
        assert taken == [factor == 1.0 for factor in factors]
        for model, old, gradients, stepped in zip((a, b), before, expected, taken, strict=True):
            wanted = torch.cat([g.flatten() for g in gradients]) if stepped else torch.zeros_like(old)
            torch.testing.assert_close(old - vector(model), wanted, rtol=1e-2, atol=1e-4)
    scale = precision.state_dict()["scale"]
    if order == "one after the other":
        assert scale == {None: 2.0**12, "both": 2.0**-4}.get(bad, 2.0**4)
    else:  # torch's recipe: one update for the two
        assert scale == (2.0**8 if bad is None else 1.0)


def test_two_steps_need_a_backward_between_them() -> None:
    precision, model, (batch,) = scaling(), net(), data(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaled_backward(precision, model, batch)
    precision.optimizer_step(optimizer)
    before = vector(model)
    with pytest.raises(RuntimeError, match="SGD has stepped already"):
        precision.optimizer_step(optimizer)
    assert torch.equal(before, vector(model))


def test_gradients_of_unknown_scale_are_refused() -> None:
    precision, model, (batch,) = scaling(), net(), data(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_of(model, batch).backward()
    before = vector(model)
    for call in (precision.unscale_gradients, precision.optimizer_step, lambda o: precision.clip_gradients(o, 1.0)):
        with pytest.raises(RuntimeError, match="gradients of SGD are not scaled"):
            call(optimizer)
    assert torch.equal(before, vector(model))


def test_scaled_backward_after_unscaling_refused() -> None:
    """Scaled gradients are not added to unscaled ones."""
    precision, model, (batch,) = scaling(), net(), data(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaled_backward(precision, model, batch)
    precision.clip_gradients(optimizer, 1.0)
    with pytest.raises(RuntimeError, match="added scaled gradients to those of SGD"):
        scaled_backward(precision, model, batch)


def test_a_step_that_the_user_leaves_out() -> None:
    precision, model, (batch,) = scaling(), net(), data(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        scaled_backward(precision, model, batch)
        precision.clip_gradients(optimizer, 0.01)
        optimizer.zero_grad()
    before = vector(model)
    scaled_backward(precision, model, batch)
    precision.clip_gradients(optimizer, 0.01)
    assert precision.optimizer_step(optimizer)
    assert (before - vector(model)).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_step_without_gradients() -> None:
    """An optimizer without gradients steps as in plain torch."""
    precision, model = make("16-mixed"), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = vector(model)
    precision.unscale_gradients(optimizer)
    assert precision.optimizer_step(optimizer) is True
    assert precision.optimizer_step(optimizer, lambda: None) is True
    assert torch.equal(before, vector(model))


def test_failed_step_restores_optimizer() -> None:
    """A step that raises leaves the optimizer as it was."""
    precision, model, (batch,) = scaling(), net(), data(1)

    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            raise ZeroDivisionError

    optimizer = Breaks(model.parameters(), lr=1.0)
    scaled_backward(precision, model, batch)
    with pytest.raises(ZeroDivisionError):
        precision.optimizer_step(optimizer)
    assert "step" not in vars(optimizer)


@pytest.mark.one_accelerator  # others may have no sparse tensors
def test_sparse_gradients_are_unscaled() -> None:
    precision = scaling(2.0**4)
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    before = table.weight.detach().clone()
    precision.backward(table(torch.tensor([1, 1, 3])).sum())
    assert precision.optimizer_step(optimizer)
    moved = (before - table.weight.detach())[:, 0]
    torch.testing.assert_close(moved, torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0]))
