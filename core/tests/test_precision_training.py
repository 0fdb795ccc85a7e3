"""Test training in each precision against plain PyTorch loops, and the optimizers that it accepts.

Ids such as PRE-10 in comments are those of the conformance checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hardware
import pytest
import torch
from precision_loops import OPTIMIZERS, data, loss_of, make, net, run, same_parameters, vector
from torch import nn

from torchhal.precision import Precision

pytestmark = pytest.mark.usefixtures("accelerator", "precision_state")


@pytest.mark.parametrize("alias", ["32-true", "64-true", "bf16-true", "16-true"])
def test_full_precision_equals_plain_loop(alias: str) -> None:  # PRE-25
    """Training in full precision equals the plain loop bit for bit."""
    precision = make(alias)
    model, plain, dtype = precision.convert_module(net()), net().to(precision.param_dtype), precision.param_dtype
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = run(precision, model, optimizer, data(20), clip=0.3)
    for x, y in data(20):
        other.zero_grad()
        loss_of(plain, (x.to(dtype), y.to(dtype))).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        other.step()
    assert same_parameters(model, plain)
    assert {loss.dtype for loss in losses} == {max(dtype, torch.float32, key=lambda each: each.itemsize)}


@pytest.mark.parametrize("alias", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_mixed_equals_plain_recipe(alias: str, clip: float | None) -> None:  # PRE-25
    """Training in mixed precision equals torch's plain recipe bit for bit."""
    precision = make(alias)
    model, plain = precision.convert_module(net()), net()
    optimizer, other = torch.optim.Adam(model.parameters()), torch.optim.Adam(plain.parameters())
    run(precision, model, optimizer, data(20), clip)
    scaler = torch.amp.GradScaler(hardware.name(), enabled=alias == "16-mixed")
    for batch in data(20):
        other.zero_grad()
        with torch.autocast(hardware.name(), precision.compute_dtype):
            loss = loss_of(plain, batch)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(other)
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        scaler.step(other)
        scaler.update()
    assert same_parameters(model, plain)
    assert precision.state_dict() == scaler.state_dict()
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # PRE-20


@pytest.mark.parametrize(
    ("alias", "tolerance"),
    [("64-true", 1e-6), ("bf16-true", 5e-2), ("16-true", 1e-2), ("bf16-mixed", 2e-2), ("16-mixed", 5e-3)],
)
def test_loss_curve_is_near_float32(alias: str, tolerance: float) -> None:  # PRE-25
    curves = []
    for name in (alias, "32-true"):
        precision = make(name)
        model = precision.convert_module(net())
        losses = run(precision, model, torch.optim.SGD(model.parameters(), lr=0.2), data(1) * 20)
        curves.append(torch.stack(losses).double())
    assert curves[1][-1] < 0.5 * curves[1][0]
    torch.testing.assert_close(curves[0], curves[1], rtol=tolerance, atol=tolerance / 10)
    assert not torch.equal(curves[0], curves[1])  # something else than float32 did run


def test_closure_optimizers_refused_for_float16() -> None:  # PRE-18
    """Optimizers that need a closure are refused for float16 only."""
    model = net()

    class Own(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return super().step(closure)

    for optimizer in (torch.optim.LBFGS(model.parameters()), Own(model.parameters(), lr=0.1)):
        with pytest.raises(TypeError, match=rf"'16-mixed' doesn't work with optimizer {type(optimizer).__name__}: "):
            make("16-mixed").check_optimizer(optimizer)
        with pytest.raises(TypeError, match="'16-true' doesn't work with optimizer"):
            make("16-true").check_optimizer(optimizer)
        for alias in ("32-true", "64-true", "bf16-true", "bf16-mixed"):
            make(alias).check_optimizer(optimizer)


def test_optimizers_that_work_are_accepted() -> None:
    parameters = list(net().parameters())
    for make_one in OPTIMIZERS.values():
        make("16-mixed").check_optimizer(make_one(parameters))
    scheduled = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    make("16-mixed").check_optimizer(scheduled)

    class Told(torch.optim.SGD):
        def step(self, loss: Any) -> Any:  # type: ignore[override]
            return super().step()

    make("16-mixed").check_optimizer(Told(parameters, lr=0.1))  # evaluates nothing, whatever else it needs


def test_unscalable_optimizers_refused() -> None:  # PRE-19
    """Optimizers with torch's old unscaling protocol or over half-width weights are refused."""

    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    with pytest.raises(TypeError, match=r"'16-mixed' doesn't work with optimizer Old: its step\(grad_scaler="):
        make("16-mixed").check_optimizer(Old(net().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="'16-mixed' doesn't work with optimizer SGD over float16 parameters"):
        make("16-mixed").check_optimizer(torch.optim.SGD(net().half().parameters(), lr=0.1))


@pytest.mark.parametrize("alias", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_fused_is_the_same_as_not_fused(alias: str, clip: float | None) -> None:  # PRE-19
    results = []
    for kind in ("adam", "fused adam"):
        model = net()
        run(make(alias), model, OPTIMIZERS[kind](model.parameters()), data(10), clip)
        results.append(vector(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def closure_for(precision: Precision, model: nn.Module, optimizer: Any, batch: Any) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with precision.forward_context():
            loss = loss_of(model, precision.convert_input(batch))
        precision.backward(loss)
        precision.clip_gradients(optimizer, 0.2)
        return loss

    return closure


@pytest.mark.parametrize("alias", ["32-true", "64-true", "bf16-mixed", "16-mixed"])
def test_a_closure_gives_the_same_step(alias: str) -> None:
    a, b = make(alias), make(alias)
    model, other = a.convert_module(net()), b.convert_module(net())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run(a, model, sgd, data(5), clip=0.2)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    for batch in data(5):
        with torch.no_grad():
            assert b.optimizer_step(sgd, closure_for(b, other, sgd, batch)) is True
    assert same_parameters(model, other)


@pytest.mark.parametrize("inside", [False, True])
def test_lbfgs_under_bfloat16_sees_each_new_weight(inside: bool) -> None:
    """Its evaluations all run within one step: casts of earlier weights must not be used."""
    precision, (batch,), model, plain = make("bf16-mixed"), data(1), net(), net()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=6)
    if inside:  # optimized by hand in a training step, whose autocast the closure relies on

        def closure() -> torch.Tensor:
            lbfgs.zero_grad()
            loss = loss_of(model, batch)
            precision.backward(loss)
            precision.clip_gradients(lbfgs, 0.2)
            return loss

        with precision.forward_context():
            precision.optimizer_step(lbfgs, closure)
    else:
        precision.optimizer_step(lbfgs, closure_for(precision, model, lbfgs, batch))

    other = torch.optim.LBFGS(plain.parameters(), max_iter=6)

    def reference() -> torch.Tensor:
        other.zero_grad()
        with torch.autocast(hardware.name(), torch.bfloat16):
            loss = loss_of(plain, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        return loss

    other.step(reference)
    assert same_parameters(model, plain)


@pytest.mark.parametrize("alias", ["bf16-mixed", "16-mixed"])
def test_manual_step_inside_autocast(alias: str) -> None:
    """Optimizing by hand inside a step's autocast gives the same weights as outside."""
    results = []
    for inside in (False, True):
        precision, model = make(alias), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if inside:
            with precision.forward_context():
                for batch in data(4):
                    optimizer.zero_grad()
                    # the product's backward has matrix products of float32 tensors, which autocast would lower
                    with torch.autocast(hardware.name(), enabled=False):
                        extra = (model[2].weight @ model[0].weight).square().mean()
                    precision.backward(loss_of(model, batch) + extra)
                    precision.optimizer_step(optimizer)
        else:
            for batch in data(4):
                optimizer.zero_grad()
                extra = (model[2].weight @ model[0].weight).square().mean()
                with precision.forward_context():
                    loss = loss_of(model, batch)
                precision.backward(loss + extra)
                precision.optimizer_step(optimizer)
        results.append(vector(model))
    assert torch.equal(results[0], results[1])


def test_main_params_gives_each_once() -> None:  # PRE-22
    model = net()
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([{"params": [*model.parameters(), model[0].weight]}], lr=0.1)
    assert [id(p) for p in make("16-mixed").main_params(optimizer)] == [id(p) for p in model.parameters()]
