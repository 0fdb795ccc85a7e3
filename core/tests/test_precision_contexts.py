"""Test the conversion of batches, autocast and default dtypes of precisions.

Ids such as PRE-10 in comments are those of the conformance checks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import hardware
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision_loops import data, loss_of, make, net
from torch import nn

from torchhal.accelerators import Accelerator
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import MixedPrecision, mixed

pytestmark = pytest.mark.usefixtures("accelerator", "precision_state")


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


def check_cast(old: Any, new: Any, dtype: torch.dtype, stays: tuple[torch.dtype, ...] = ()) -> bool:
    """Whether ``new`` is ``old`` itself, after checking that it is what a cast of all dtypes but ``stays`` gives."""
    assert type(new) is type(old)
    if isinstance(old, torch.Tensor):
        assert new.dtype is (dtype if old.is_floating_point() and old.dtype not in stays else old.dtype)
        assert new.shape == old.shape
        assert (new is old) == (new.dtype is old.dtype)
    elif isinstance(old, dict):
        assert list(new) == list(old)
        unchanged = [check_cast(old[key], new[key], dtype, stays) for key in old]
        assert (new is old) == all(unchanged)
    elif isinstance(old, list | tuple):
        assert len(new) == len(old)
        unchanged = [check_cast(a, b, dtype, stays) for a, b in zip(old, new, strict=True)]
        assert (new is old) == all(unchanged)
    else:
        assert new is old
    return new is old


@settings(max_examples=60, deadline=None)
@given(batch=BATCHES, alias=st.sampled_from(["64-true", "bf16-true", "16-true"]))
def test_input_conversion(batch: Any, alias: str) -> None:  # PRE-07
    """Floats alone are cast, in any nesting, and nothing is copied without need."""
    precision = make(alias)
    check_cast(batch, precision.convert_input(batch), precision.param_dtype)


@settings(max_examples=40, deadline=None)
@given(batch=BATCHES, alias=st.sampled_from(["64-true", "bf16-true", "16-mixed", "bf16-mixed"]))
def test_outputs_in_the_default_dtype(batch: Any, alias: str) -> None:  # PRE-08
    """A loss in float64 keeps its digits; a narrower one has the default dtype's."""
    precision = make(alias)
    check_cast(batch, precision.convert_output(batch), torch.float32, stays=(torch.float64,))


def test_output_conversion_inside_context() -> None:
    """An output that is converted inside the context is not left in half width."""
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


def test_step_makes_own_tensors() -> None:
    """A step may make tensors of its own in the precision's dtype."""
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


def test_no_grad_forward_leaves_autocast_cache() -> None:
    """A forward without gradients leaves no cached weights that cost a later one its gradients."""
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
def test_autocast_cache_depends_on_torch(safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast caches weights only with a torch that does it right."""
    monkeypatch.setattr(mixed, "_CACHE_WEIGHTS", safe)
    with make("bf16-mixed").forward_context():
        assert torch.is_autocast_cache_enabled() is safe
    assert torch.is_autocast_cache_enabled()


def test_mixed_must_be_set_up_first() -> None:
    with pytest.raises(RuntimeError, match=r"setup\(\) must come before"):
        MixedPrecision("bfloat16").forward_context()


def test_device_without_autocast_refused() -> None:
    """Mixed precision refuses a device without autocast by name."""

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
