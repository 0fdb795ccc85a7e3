"""Test the words of capabilities, what components derive from their declarations, and the lists of older plugins."""

from __future__ import annotations

import warnings

import pytest
import torch
from plans import Fake, fake, plan

from torchhal import capabilities as words
from torchhal.accelerators import Accelerator, CPUAccelerator
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.precision import MixedPrecision, Precision, SinglePrecision, TruePrecision
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("registry", "no_leftovers")]

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def old():
    """Silences what classes of before capabilities warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


# -- words ---------------------------------------------------------------------------------------------------


def test_words_are_made_from_dtypes():
    assert words.compute(BF16, F64) == {"compute:bfloat16", "compute:float64"}
    assert words.store(F32) | words.autocast(F16) == {"store:float32", "autocast:float16"}
    assert words.collective("avg") == {"collective:avg"}
    assert words.dtypes_of("store", {"store:float64", "store:float16", "compute:bfloat16", "store:posit8"}) == [
        F16,
        F64,
    ]


def test_other_stores_leaves_out_the_given():
    lacks = words.other_stores(F32, F16)
    assert {"store:bfloat16", "store:float64", "store:float8_e4m3fn"} <= lacks
    assert not lacks & {"store:float32", "store:float16", "store:int64"}


def test_missing_and_describe():
    assert words.missing({"a", "b:c"}, {"b:c", "d"}) == {"a"}
    assert words.describe({"b:c", "a"}) == "a, b:c" and words.describe(()) == "none"


@pytest.mark.parametrize(
    "value", ["compute:float32", ["compute:float32"], None, {"Compute"}, {"a b"}, {"a:"}, {1}, {""}]
)
def test_invalid_capabilities_are_refused(value):
    with pytest.raises(ConfigurationError, match=r"Mine\.needs must be a frozenset of words"):
        words.check_capabilities(value, "Mine.needs")


@pytest.mark.parametrize("kind", ["accelerator", "precision", "strategy"])
def test_resolve_names_the_class_of_an_invalid_declaration(kind):
    bases = {"accelerator": (CPUAccelerator, "capabilities"), "precision": (Precision, "needs")}
    base, attribute = bases.get(kind, (DDPStrategy, "lacks"))
    mine = type("Mine", (base,), {attribute: ["compute:float32"]})
    with pytest.raises(ConfigurationError, match=rf"Mine\.{attribute} must be a frozenset"):
        plan(**{"accelerator": "cpu", kind: mine})


# -- needs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "needs"),
    [
        (Precision(), {"compute:float32", "store:float32"}),
        (SinglePrecision(), {"compute:float32", "store:float32"}),
        (TruePrecision("float64"), {"compute:float64", "store:float64"}),
        (TruePrecision("bfloat16"), {"compute:bfloat16", "store:bfloat16"}),
        (MixedPrecision("bfloat16"), {"compute:bfloat16", "store:float32", "autocast:bfloat16"}),
        (MixedPrecision("float16"), {"compute:float16", "store:float32", "autocast:float16", "loss_scaling"}),
    ],
    ids=["base", "32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"],
)
def test_needs_follow_from_declarations(precision, needs):
    assert precision.needs == needs


def test_needs_are_set_in_class_or_constructor():
    class InClass(Precision):
        needs = frozenset({"fp8:e4m3"})

    class InConstructor(MixedPrecision):
        def __init__(self):
            super().__init__("bfloat16")
            self.needs = self.needs | {"fp8:e4m3"}

    assert InClass().needs == InClass.needs == {"fp8:e4m3"}
    assert InConstructor().needs == MixedPrecision("bfloat16").needs | {"fp8:e4m3"}
    assert Precision.needs == {"compute:float32", "store:float32"}


def test_a_dtype_set_in_the_constructor_counts():
    class Double(Precision):
        def __init__(self):
            self.param_dtype = self.compute_dtype = F64

    assert Double().needs == {"compute:float64", "store:float64"}


# -- matching ------------------------------------------------------------------------------------------------


class Board(Fake):
    name = "board"
    capabilities = words.compute(F32, BF16) | words.store(F32) | {"fp8:e4m3"}


class FP8(Precision):
    alias = "acme-fp8"
    needs = Precision.needs | {"fp8:e4m3"}


def test_components_that_know_nothing_of_each_other_fit():
    assert plan(accelerator=Board(), precision=FP8()).precision.alias == "acme-fp8"


@pytest.mark.parametrize("alias", ["", "fp8"])
def test_refusal_names_what_is_missing(registry, alias):
    """An object without a published alias is refused for the same reason as a published one."""
    if alias:
        registry.register("precision", alias, FP8)
    with pytest.raises(UnsupportedCombinationError) as caught:
        plan(accelerator="cpu", precision=alias or FP8())
    said = str(caught.value)
    name = alias or "acme-fp8"
    assert (
        f"precision {name!r} needs fp8:e4m3, which accelerator 'cpu' doesn't have (it has autocast:bfloat16, " in said
    )
    assert "use another precision" in said and "CPUAccelerator.capabilities" in said


def test_each_missing_word_is_named():
    rule = "'16-mixed' needs autocast:float16, compute:float16, loss_scaling, which accelerator 'board' doesn't have"
    with pytest.raises(UnsupportedCombinationError, match=rule):
        plan(accelerator=Board(), precision=MixedPrecision("float16"))


def test_a_precision_that_declares_nothing_fits_everything():
    class Mine(Precision):
        alias = "mine"

        def backward(self, loss, *args, through=None, **kwargs):
            super().backward(loss, *args, through=through, **kwargs)

    for accelerator in (Board(), CPUAccelerator(), Fake()):
        assert plan(accelerator=accelerator, precision=Mine()).precision.alias == "mine"


class Engine(SingleDeviceStrategy):
    lacks = frozenset({words.LOSS_SCALING})
    precision_methods = frozenset({"setup", "convert_input"})
    implements_precisions = (MixedPrecision,)


def test_a_strategy_names_what_it_cannot_carry():
    rule = "precision '16-mixed' needs loss_scaling, which strategy 'Engine' can't carry"
    with pytest.raises(UnsupportedCombinationError, match=rule):
        plan(accelerator="cpu", strategy=Engine(), precision="16-mixed")


def test_a_strategy_names_the_method_that_it_never_calls():
    class Mine(MixedPrecision):
        alias = "mine"

        def forward_context(self):
            return super().forward_context()

        def convert_input(self, batch):
            return batch

    for fits in (MixedPrecision("bfloat16"), SinglePrecision()):
        assert plan(accelerator="cpu", strategy=Engine(), precision=fits).strategy.alias == "Engine"
    with pytest.raises(UnsupportedCombinationError) as caught:
        plan(accelerator="cpu", strategy=Engine(), precision=Mine("bfloat16"))
    assert "overrides forward_context() of Mine, which strategy 'Engine' never calls" in str(caught.value)
    patched = SinglePrecision()
    patched.optimizer_step = lambda optimizer, closure=None: True
    with pytest.raises(UnsupportedCombinationError, match=r"overrides optimizer_step\(\) of SinglePrecision"):
        plan(accelerator="cpu", strategy=Engine(), precision=patched)


def test_methods_of_a_mixed_precision_count_for_a_strategy_without_one():
    without = type("Without", (Engine,), {"implements_precisions": ()})
    with pytest.raises(UnsupportedCombinationError, match=r"overrides backward\(\), .*optimizer_step\(\)"):
        plan(accelerator="cpu", strategy=without(), precision="bf16-mixed")


class Scatters(DDPStrategy):
    needs = words.collective("reduce_scatter")


def test_a_strategy_needs_something_of_the_backend():
    assert plan(accelerator="cpu", strategy=Scatters()).strategy.alias == "Scatters"
    rule = "strategy 'Scatters' needs collective:reduce_scatter, which accelerator 'board' doesn't have"
    with pytest.raises(UnsupportedCombinationError, match=rule):
        plan(accelerator=Board(), strategy=Scatters())
    own = Scatters(process_group_backend="mine")
    assert plan(accelerator=Board(), strategy=own).strategy.value is own


# -- lists of before capabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "attribute", "value"),
    [
        (CPUAccelerator, "precisions", frozenset({"32-true"})),
        (CPUAccelerator, "backend_averages", False),
        (Precision, "accelerators", frozenset({"cpu"})),
        (DDPStrategy, "precisions", frozenset({"32-true"})),
    ],
)
def test_replaced_attributes_warn_once_per_class(base, attribute, value):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        class Old(base):
            pass

        assert not caught

        class Older(base):
            locals()[attribute] = value

        class Child(Older):
            pass

        for _ in range(2):
            components = {"accelerator": "cpu"}
            kind = {CPUAccelerator: "accelerator", Precision: "precision", DDPStrategy: "strategy"}[base]
            plan(**{**components, kind: Child()})
    (warning,) = caught
    assert warning.category is FutureWarning and warning.filename == __file__
    assert f"Older.{attribute} is replaced" in str(warning.message) and "until torchhal 1.0" in str(warning.message)


def test_capabilities_follow_from_an_old_list(old):
    class Older(Accelerator):
        precisions = frozenset({"32-true", "bf16-mixed", "acme-fp8"})
        backend_averages = False

    expected = {"compute:float32", "store:float32", "compute:bfloat16", "autocast:bfloat16"}
    has = {capability for capability in Older.capabilities if not capability.startswith("collective:")}
    assert has == expected
    assert "collective:avg" not in Older.capabilities and "collective:reduce_scatter" in Older.capabilities


ALIASES = ("32-true", "64-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed")


@pytest.mark.parametrize("only", ALIASES)
@pytest.mark.parametrize("asked", ALIASES)
def test_an_old_list_refuses_what_it_refused(old, only, asked):
    listing = fake("older", device_type="cpu", precisions=frozenset({only, "32-true"}))
    if asked in (only, "32-true"):
        assert plan(accelerator=listing(), precision=asked).precision.alias == asked
        return
    with pytest.raises(UnsupportedCombinationError, match=f"'older' does not compute in precision '{asked}': it knows"):
        plan(accelerator=listing(), precision=asked)


def test_an_old_list_admits_a_precision_that_needs_no_more(old, registry):
    class Half(Precision):
        alias = "acme-half"
        compute_dtype = BF16

    listing = fake("older", precisions=frozenset({"32-true", "bf16-mixed"}))
    assert plan(accelerator=listing(), precision=Half()).precision.alias == "acme-half"


def test_an_old_list_admits_its_aliases(old):
    class Odd(Precision):
        alias = "acme-odd"
        needs = frozenset({"odd"})

    listing = fake("older", precisions=frozenset({"32-true", "acme-odd"}))
    assert plan(accelerator=listing(), precision=Odd()).precision.alias == "acme-odd"


def test_an_old_list_inherits_what_no_list_could_hold(old):
    wide = type("Wide", (Fake,), {"capabilities": Fake.capabilities | {"fp8:e4m3", words.TF32}})
    older = type("Older", (wide,), {"precisions": frozenset({"32-true"})})
    assert {"fp8:e4m3", words.TF32} <= older.capabilities and "compute:bfloat16" not in older.capabilities
    assert plan(accelerator=older(), precision=FP8()).precision.alias == "acme-fp8"


def test_aliases_that_are_read_are_cores():
    """A package that has tf32 need not be installed where an accelerator declares the mode."""
    mine = type("Mine", (Fake,), {"capabilities": words.STANDARD | {words.TF32}})
    assert mine.precisions == Accelerator.precisions


def test_reading_the_replaced_attributes_agrees_with_capabilities():
    class Mine(Accelerator):
        capabilities = words.STANDARD - words.collective("avg") - words.autocast(F16)

    assert Accelerator.precisions == {"32-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed"}
    assert Accelerator.backend_averages and not Mine.backend_averages
    assert Mine.precisions == Accelerator.precisions - {"16-mixed"}


def test_new_declarations_win_over_old_ones_of_the_same_class():
    """For a plugin that works with releases before and after."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Both(Fake):
            precisions = frozenset({"32-true"})
            capabilities = Board.capabilities

        class BothPrecision(Precision):
            accelerators = frozenset({"nowhere"})
            needs = frozenset({"fp8:e4m3"})

        class BothStrategy(DDPStrategy):
            precisions = frozenset({"32-true"})
            lacks = frozenset()

    assert plan(accelerator=Both(), precision=BothPrecision(), strategy=BothStrategy()).strategy.alias == "BothStrategy"


def test_new_declarations_win_over_old_ones_of_a_base(old):
    older = fake("older", precisions=frozenset({"32-true"}))
    newer = type("Newer", (older,), {"capabilities": Board.capabilities})
    assert plan(accelerator=newer(), precision=FP8()).precision.alias == "acme-fp8"
    with pytest.raises(UnsupportedCombinationError, match="does not compute in precision 'bf16-mixed'"):
        plan(accelerator=older(), precision="bf16-mixed")
