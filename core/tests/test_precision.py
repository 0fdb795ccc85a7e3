"""Precisions against plain PyTorch loops. Ids such as PRE-10 are those of the conformance checks."""

from __future__ import annotations

import copy
import importlib
import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import hardware
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchhal._overrides import overrides
from torchhal.accelerators import Accelerator, CPUAccelerator
from torchhal.errors import CheckpointMismatchError, UnsupportedCombinationError
from torchhal.precision import MixedPrecision, Precision, SinglePrecision, TruePrecision, mixed
from torchhal.registry import _builtin as builtin

pytestmark = pytest.mark.usefixtures("accelerator")
ALIASES = {component.alias: component for component in builtin.torchhal_precisions()}
PER_STEP = (
    "convert_input", "convert_output", "forward_context", "backward", "unscale_gradients", "clip_gradients",
    "optimizer_step",
)  # fmt: skip


def make(alias: str, **more: Any) -> Any:
    component = ALIASES[alias]
    module, _, name = component.target.partition(":")
    precision = getattr(importlib.import_module(module), name)(**component.defaults, **more)
    precision.setup(hardware.accelerator(), hardware.device())
    return precision


def scaling(init_scale: float = 2.0**10, **options: Any) -> MixedPrecision:
    return make("16-mixed", scaler=torch.amp.GradScaler(hardware.name(), init_scale=init_scale, **options))


@pytest.fixture(autouse=True)
def _global_state(accelerator: str) -> Iterator[None]:
    """Everything that a test makes lies on its device."""
    torch.manual_seed(0)
    with hardware.device():
        yield
    clean = torch.get_default_dtype() is torch.float32 and not torch.is_autocast_enabled(hardware.name())
    torch.set_default_dtype(torch.float32)
    assert clean, "the test left a default dtype or autocast behind"


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def data(n: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    xs = torch.randn(n, rows, 6, generator=generator, device="cpu").to(hardware.device())
    return [(x, (x.sum(1, keepdim=True) / 3).sin()) for x in xs]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def run(
    precision: Precision, model: nn.Module, optimizer: Any, batches: Any, clip: float | None = None
) -> list[torch.Tensor]:
    """Optimizer steps in the order the contract gives."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with precision.forward_context():
            loss = loss_of(model, precision.convert_input(batch))
        precision.backward(loss)
        if clip is not None:
            precision.unscale_gradients(optimizer)
            precision.clip_gradients(optimizer, clip)
        precision.optimizer_step(optimizer)
        losses.append(precision.convert_output(loss.detach()))
    return losses


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


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


def test_every_builtin_alias_is_in_the_table_above() -> None:
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
def test_a_loop_calls_only_what_a_precision_changes(alias: str, expected: set[str]) -> None:
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


def test_conversion_in_place_is_idempotent_and_keeps_storage() -> None:
    precision, model = make("64-true"), net()
    precision.convert_module(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    precision.convert_module(model)
    assert addresses == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("alias", ["bf16-mixed", "16-mixed"])
def test_mixed_gives_half_width_trainable_weights_their_width_back(alias: str) -> None:  # PRE-20
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


# -- batches -------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


TENSORS = st.builds(
    lambda dtype, shape: torch.ones(shape).to(dtype),
    st.sampled_from(
        [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.cfloat]
    ),
    st.sampled_from([(), (0,), (2, 3)]),
)
LEAVES = st.one_of(TENSORS, st.none(), st.text(max_size=3), st.integers(), st.floats())
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def check_cast(old: Any, new: Any, dtype: torch.dtype) -> bool:
    """Whether ``new`` is ``old`` itself, after checking that it is what a cast must give."""
    assert type(new) is type(old)
    if isinstance(old, torch.Tensor):
        assert new.dtype is (dtype if old.is_floating_point() else old.dtype)
        assert new.shape == old.shape
        assert (new is old) == (new.dtype is old.dtype)
    elif isinstance(old, dict):
        assert list(new) == list(old)
        unchanged = [check_cast(old[key], new[key], dtype) for key in old]
        assert (new is old) == all(unchanged)
    elif isinstance(old, list | tuple):
        assert len(new) == len(old)
        unchanged = [check_cast(a, b, dtype) for a, b in zip(old, new, strict=True)]
        assert (new is old) == all(unchanged)
    else:
        assert new is old
    return new is old


@settings(max_examples=60, deadline=None)
@given(batch=BATCHES, alias=st.sampled_from(["64-true", "bf16-true", "16-true"]))
def test_inputs_floats_only_any_nesting_no_needless_copy(batch: Any, alias: str) -> None:  # PRE-07
    precision = make(alias)
    check_cast(batch, precision.convert_input(batch), precision.param_dtype)


@settings(max_examples=40, deadline=None)
@given(batch=BATCHES, alias=st.sampled_from(["64-true", "bf16-true", "16-mixed", "bf16-mixed"]))
def test_outputs_in_the_default_dtype(batch: Any, alias: str) -> None:  # PRE-08
    precision = make(alias)
    check_cast(batch, precision.convert_output(batch), torch.float32)


def test_output_inside_the_context_is_not_left_in_half_width() -> None:
    precision = make("bf16-true")
    with precision.forward_context():
        assert precision.convert_output(torch.ones(1)).dtype is torch.float32


def test_gradients_flow_through_the_output_conversion() -> None:
    precision = make("64-true")
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    precision.backward(precision.convert_output((weight * 3).sum()))
    assert torch.equal(weight.grad, torch.full((3,), 3.0, dtype=torch.float64))


def test_mixed_inputs_are_left_to_autocast() -> None:
    batch = [torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64), "text"]
    assert make("bf16-mixed").convert_input(batch) is batch


def test_packed_sequences_are_cast() -> None:
    with torch.device("cpu"):  # where torch wants the lengths
        packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]).to(hardware.device())
    new = make("64-true").convert_input(packed)
    assert type(new) is type(packed)
    assert new.data.dtype is torch.float64
    assert new.batch_sizes is packed.batch_sizes
    assert nn.LSTM(2, 2).double()(new)[0].data.shape == (4, 2)


# -- contexts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [torch.float32, torch.float64])
@pytest.mark.parametrize("alias", ["32-true", "64-true", "bf16-true", "16-true"])
@pytest.mark.parametrize("context", ["module_init_context", "forward_context"])
def test_default_dtype_contexts(alias: str, context: str, outer: torch.dtype) -> None:  # PRE-04, PRE-05, PRE-06
    precision = make(alias)
    inside = outer if alias == "32-true" else precision.param_dtype
    torch.set_default_dtype(outer)
    try:
        enter: Callable[[], Any] = getattr(precision, context)
        with enter():
            assert nn.Linear(2, 2).weight.dtype is inside
            with enter():
                assert torch.zeros(1).dtype is inside
            assert torch.zeros(1).dtype is inside
        assert torch.get_default_dtype() is outer
        with pytest.raises(ZeroDivisionError), enter(), enter():
            raise ZeroDivisionError
        assert torch.get_default_dtype() is outer
        again = enter()
        for _ in range(2):
            with again, again:
                assert torch.zeros(1).dtype is inside
            assert torch.get_default_dtype() is outer
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_step_may_make_tensors_of_its_own() -> None:
    precision = make("bf16-true")

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.zeros(6))

    model = precision.convert_module(Own(6, 1))
    x = precision.convert_input(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    with precision.forward_context():
        assert model(x).dtype is torch.bfloat16


@pytest.mark.parametrize("alias", ["bf16-mixed", "16-mixed"])
def test_autocast_nests_reenters_and_ends(alias: str) -> None:  # PRE-06
    precision = make(alias)
    a = torch.ones(2, 2)
    context = precision.forward_context()
    for _ in range(2):
        with context:
            with context:
                assert (a @ a).dtype is precision.compute_dtype
            assert (a @ a).dtype is precision.compute_dtype
            with torch.autocast(hardware.name(), enabled=False):
                with precision.forward_context():
                    assert (a @ a).dtype is precision.compute_dtype
                assert (a @ a).dtype is torch.float32
        assert (a @ a).dtype is torch.float32
    with pytest.raises(ZeroDivisionError), context, context:
        raise ZeroDivisionError
    assert (a @ a).dtype is torch.float32
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16  # torch's own default for the CPU


def test_no_weights_are_kept_between_steps() -> None:
    precision, model, x = make("bf16-mixed"), net(), torch.ones(1, 6)
    with torch.no_grad(), precision.forward_context():
        before = model(x)
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.fill_(3.0)
    with torch.no_grad(), precision.forward_context():
        assert model(x).item() == 3.0 != before.item()


def test_a_forward_without_gradients_costs_a_later_one_nothing() -> None:
    precision, model, (batch,) = make("bf16-mixed"), net(), data(1)
    with precision.forward_context():
        with torch.no_grad():
            model(batch[0])
        loss = loss_of(model, batch)
    precision.backward(loss)
    reference = net()
    with torch.autocast(hardware.name(), torch.bfloat16, cache_enabled=False):
        loss = loss_of(reference, batch)
    loss.backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("safe", [True, False])
def test_weights_are_cached_only_where_torch_does_it_right(safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "_CACHE_WEIGHTS", safe)
    with make("bf16-mixed").forward_context():
        assert torch.is_autocast_cache_enabled() is safe
    assert torch.is_autocast_cache_enabled()


def test_mixed_must_be_set_up_first() -> None:
    with pytest.raises(RuntimeError, match=r"setup\(\) must come before"):
        MixedPrecision("bfloat16").forward_context()


def test_a_device_without_autocast_is_refused_by_name() -> None:
    class Meta(Accelerator):
        name: ClassVar[str] = "nothing"
        device_type: ClassVar[str] = "meta"

    with pytest.raises(UnsupportedCombinationError, match=r"'bf16-mixed'.*'nothing'.*'meta'"):
        MixedPrecision("bfloat16").setup(Meta(), torch.device("meta"))


@pytest.mark.parametrize("context", ["module_init_context", "forward_context"])
def test_teardown_gives_back_an_open_default_dtype(context: str) -> None:  # PRE-24
    precision = make("bf16-true")
    entered = getattr(precision, context)()
    entered.__enter__()
    entered.__enter__()
    precision.teardown()
    precision.teardown()
    assert torch.get_default_dtype() is torch.float32
    entered.__exit__(None, None, None)
    assert torch.get_default_dtype() is torch.float32


# -- training against plain loops -----------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["32-true", "64-true", "bf16-true", "16-true"])
def test_full_precision_is_the_plain_loop_bit_for_bit(alias: str) -> None:  # PRE-25
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
    assert {loss.dtype for loss in losses} == {torch.float32}


@pytest.mark.parametrize("alias", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_mixed_is_the_plain_recipe_bit_for_bit(alias: str, clip: float | None) -> None:  # PRE-25
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
        curves.append(torch.stack(run(precision, model, torch.optim.SGD(model.parameters(), lr=0.2), data(1) * 20)))
    assert curves[1][-1] < 0.5 * curves[1][0]
    torch.testing.assert_close(curves[0], curves[1], rtol=tolerance, atol=tolerance / 10)
    assert not torch.equal(curves[0], curves[1])  # something else than float32 did run


# -- the scaler ----------------------------------------------------------------------------------------------


def half_gradients(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """True gradients under float16 autocast; float64 would differ, powers of two as scales don't."""
    model = copy.deepcopy(model)
    with torch.autocast(hardware.name(), torch.float16):
        loss = loss_of(model, batch)
    (loss * 2.0**10).backward()
    return [p.grad / 2.0**10 for p in model.parameters()]


def scaled_backward(precision: MixedPrecision, model: nn.Module, batch: Any, factor: float = 1.0) -> None:
    with precision.forward_context():
        loss = loss_of(model, batch)
    precision.backward(loss * factor)


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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_bad_step_is_left_out_and_reported(kind: str, clip: float | None, bad: float) -> None:  # PRE-13, PRE-14
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


def test_micro_batches_make_one_big_step_and_one_update() -> None:  # PRE-15
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


def test_setup_again_keeps_the_scale_and_teardown_forgets_an_open_step() -> None:  # PRE-24
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


# -- optimizers ----------------------------------------------------------------------------------------------


def test_optimizers_with_closures_are_refused_for_float16_only() -> None:  # PRE-18
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


def test_the_old_unscaling_protocol_and_half_weights_are_refused() -> None:  # PRE-19
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
def test_optimizing_by_hand_inside_a_step_is_the_same_as_outside(alias: str) -> None:
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


def test_scaled_gradients_are_not_added_to_unscaled_ones() -> None:
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


def test_an_optimizer_without_gradients_steps_as_in_plain_torch() -> None:
    precision, model = make("16-mixed"), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = vector(model)
    precision.unscale_gradients(optimizer)
    assert precision.optimizer_step(optimizer) is True
    assert precision.optimizer_step(optimizer, lambda: None) is True
    assert torch.equal(before, vector(model))


def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
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


def test_main_params_gives_each_once() -> None:  # PRE-22
    model = net()
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([{"params": [*model.parameters(), model[0].weight]}], lr=0.1)
    assert [id(p) for p in make("16-mixed").main_params(optimizer)] == [id(p) for p in model.parameters()]


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
