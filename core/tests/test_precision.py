"""Test the dtypes that an alias of a precision stands for, and the conversion of modules.

Ids such as PRE-10 in comments are those of the conformance checks.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import hardware
import pytest
import torch
from precision_loops import ALIASES, data, make, net, run, same_parameters
from torch import nn

from torchhal._overrides import overrides
from torchhal.accelerators import CPUAccelerator
from torchhal.precision import MixedPrecision, Precision, SinglePrecision, TruePrecision

pytestmark = pytest.mark.usefixtures("accelerator", "precision_state")


PER_STEP = (
    "convert_input", "convert_output", "forward_context", "backward", "unscale_gradients", "clip_gradients",
    "optimizer_step",
)  # fmt: skip


# -- what an alias means -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "cls", "param", "compute"),
    [
        ("32-true", SinglePrecision, torch.float32, torch.float32),
        ("64-true", TruePrecision, torch.float64, torch.float64),
        ("bf16-true", TruePrecision, torch.bfloat16, torch.bfloat16),
        ("16-true", TruePrecision, torch.float16, torch.float16),
        ("bf16-mixed", MixedPrecision, torch.float32, torch.bfloat16),
        ("16-mixed", MixedPrecision, torch.float32, torch.float16),
    ],
)
def test_alias_fixes_the_dtypes(alias: str, cls: type, param: torch.dtype, compute: torch.dtype) -> None:  # PRE-01
    precision = make(alias)
    assert type(precision) is cls
    assert (precision.alias, precision.param_dtype, precision.compute_dtype) == (alias, param, compute)
    assert repr(precision) == f"{cls.__name__}({alias!r})"
    model = precision.convert_module(net())
    assert {p.dtype for p in model.parameters()} == {param}
    with precision.forward_context():
        output = model(precision.convert_input(torch.ones(2, 6)))
        assert (torch.ones(2, 6, dtype=param) @ torch.ones(6, 2, dtype=param)).dtype is compute
    assert output.dtype is compute
    with torch.no_grad(), precision.forward_context():  # PRE-23
        assert model.eval()(precision.convert_input(torch.ones(2, 6))).dtype is compute


def test_alias_table_is_complete() -> None:
    """The table above holds every built-in alias."""
    assert set(ALIASES) == {"32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"}
    assert set(ALIASES) == set(CPUAccelerator.precisions)


@pytest.mark.parametrize("dtype", ["float32", torch.float32, "half", "16", "int64", torch.int64, torch.complex64, None])
def test_full_precision_refuses_other_dtypes(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"'dtype' must .*\(got .*\)"):
        TruePrecision(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", torch.float64, "fp16", 16])
def test_mixed_precision_refuses_other_dtypes(dtype: Any) -> None:
    with pytest.raises(ValueError, match="'bfloat16', 'float16'"):
        MixedPrecision(dtype)


def test_names_and_torch_dtypes_are_the_same() -> None:
    assert TruePrecision(torch.bfloat16).alias == TruePrecision("bfloat16").alias == "bf16-true"
    assert MixedPrecision(torch.float16).alias == MixedPrecision("float16").alias == "16-mixed"


def test_bfloat16_takes_and_has_no_scaler() -> None:  # PRE-26
    with pytest.raises(ValueError, match="'scaler' must be None for 'bf16-mixed'"):
        MixedPrecision("bfloat16", scaler=torch.amp.GradScaler(hardware.name()))
    precision = make("bf16-mixed")
    assert precision.scaler is None
    assert precision.state_dict() == {}
    assert precision.features == frozenset() and make("16-mixed").features == {"scales_loss"}


def test_a_disabled_scaler_is_no_scaler() -> None:
    with pytest.raises(ValueError, match="'scaler' must be enabled"):
        MixedPrecision("float16", scaler=torch.amp.GradScaler(hardware.name(), enabled=False))


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("32-true", set()),
        ("64-true", {"convert_input", "convert_output", "forward_context"}),
        ("bf16-true", {"convert_input", "convert_output", "forward_context"}),
    ],
)
def test_overridden_step_methods(alias: str, expected: set[str]) -> None:
    """A loop calls only the methods that a precision overrides."""
    precision = make(alias)
    assert {name for name in PER_STEP if overrides(precision, Precision, name)} == expected


def test_single_precision_leaves_what_the_user_made() -> None:  # PRE-26
    precision = make("32-true")
    model = net().double()
    batch = {"x": torch.ones(2, dtype=torch.float64)}
    assert precision.convert_module(model) is model
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert precision.convert_input(batch) is batch
    with precision.forward_context():
        assert not torch.is_autocast_enabled(hardware.name())
        assert torch.get_default_dtype() is torch.float32


# -- modules -------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.counts = nn.Parameter(torch.tensor([1, 2**24 + 1]), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.inner = nn.Module()
        for name, value in {
            "mean": torch.randn(3),
            "index": torch.tensor([300, 70_001]),
            "mask": torch.tensor([True, False]),
            "rotary": torch.randn(3, dtype=torch.complex64),
        }.items():
            self.register_buffer(name, value)
        self.inner.register_buffer("mean", self.mean)
        self.inner.tied = self.weight


@pytest.mark.parametrize("alias", ["64-true", "bf16-true", "16-true"])
def test_only_floats_are_cast_and_ties_stay(alias: str) -> None:  # PRE-02, PRE-03
    precision, model = make(alias), Odd()
    model.weight.grad = torch.ones(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = dict(model.named_parameters())
    optimizer = torch.optim.SGD([model.weight, model.phase], lr=0.5)

    assert precision.convert_module(model) is model

    dtype = precision.param_dtype
    for name in ("weight", "frozen", "mean"):
        assert getattr(model, name).dtype is dtype
        assert torch.equal(getattr(model, name), before[name].to(dtype))
    for name in ("counts", "phase", "index", "mask", "rotary"):
        assert getattr(model, name).dtype is before[name].dtype
        assert torch.equal(getattr(model, name), before[name])
    assert model.inner.tied is model.weight
    assert model.inner.mean is model.mean
    assert all(parameter is objects[name] for name, parameter in model.named_parameters())
    assert not model.frozen.requires_grad
    assert model.weight.grad.dtype is dtype

    optimizer.step()  # made before the conversion
    assert torch.equal(model.weight, (before["weight"].to(dtype) - 0.5).to(dtype))


def test_conversion_is_idempotent() -> None:
    """A conversion in place keeps the storage, and a second one changes nothing."""
    precision, model = make("64-true"), net()
    precision.convert_module(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    precision.convert_module(model)
    assert addresses == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("alias", ["bf16-mixed", "16-mixed"])
def test_mixed_widens_trainable_weights(alias: str) -> None:  # PRE-20
    """Mixed precision gives trainable weights of half width their full width back."""
    precision = make(alias)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    model[1].double()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    model[2].weight.grad = torch.zeros_like(model[2].weight)
    precision.convert_module(model)
    assert {p.dtype for p in model[0].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model[1].parameters()} == {torch.float64}
    assert {p.dtype for p in model[2].parameters()} == {torch.float32}
    assert model[2].weight.grad.dtype is torch.float32
    model[1].float()
    run(precision, model, optimizer, data(6))  # the first scales may be too large for these weights
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    assert state
    assert {value.dtype for value in state} == {torch.float32}


def test_mixed_leaves_a_float32_model_alone() -> None:
    model = net()
    before = copy.deepcopy(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    make("bf16-mixed").convert_module(model)
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert same_parameters(model, before)


# -- optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ALIASES)
def test_precisions_pickle(alias: str) -> None:
    precision = make(alias)
    model = precision.convert_module(net())
    run(precision, model, torch.optim.SGD(model.parameters(), lr=0.1), data(2))
    state = precision.state_dict()
    for other in (pickle.loads(pickle.dumps(precision)), copy.deepcopy(precision)):
        assert repr(other) == repr(precision)
        assert other.state_dict() == state
        run(other, model, torch.optim.SGD(model.parameters(), lr=0.1), data(1))
