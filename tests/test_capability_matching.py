"""Match precisions and accelerators that know nothing of each other, under every strategy that is installed."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from torchhal import registry
from torchhal.accelerators import Accelerator, CPUAccelerator
from torchhal.capabilities import STANDARD, autocast, compute, store
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import MixedPrecision, Precision
from torchhal.resolve import ResolvedComponent
from torchhal.resolve._capability_match import check_needs, check_precision
from torchhal_simulator.accelerator import SimAccelerator

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


class Board(CPUAccelerator):
    """Hardware that nobody here knows, whose arithmetic has a width that nobody here knows."""

    name: ClassVar[str] = "acme-board"
    capabilities: ClassVar[frozenset[str]] = STANDARD | {"acme_posit:16"}


class Narrow(CPUAccelerator):
    """Hardware with float32 alone."""

    name: ClassVar[str] = "acme-narrow"
    capabilities: ClassVar[frozenset[str]] = compute(F32) | store(F32)


class Posit(Precision):
    """A precision that nobody here knows."""

    alias = "acme-posit"
    needs = Precision.needs | {"acme_posit:16"}


class Declared(Precision):
    """One that declares mixed dtypes, and leaves how they are computed to others."""

    alias = "acme-declared"
    compute_dtype = BF16


class Deep(MixedPrecision):
    """One that does more than autocast in a step."""

    def __init__(self) -> None:
        super().__init__("bfloat16")
        self.alias = "acme-deep"

    def optimizer_step(self, optimizer, closure=None):
        return super().optimizer_step(optimizer, closure)


STRATEGIES = [
    pytest.param(entry, id=alias) for entry in registry.entries("strategy") for alias in (entry.component.alias,)
]
DOES_THE_STEP = ("deepspeed", "ipu_strategy")
"""Strategies that never call ``Precision.optimizer_step``."""


def match(entry, accelerator: Accelerator, precision: Precision) -> None:
    """Match as ``resolve`` does; the strategy is not initialised, as some need a vendor's library for that."""
    cls = entry.load()
    strategy = cls.__new__(cls)
    if entry.component.alias == "bagua":
        strategy.algorithm = "gradient_allreduce"
    strategy.process_group_backend = None
    strategy.axes = {"shard": 2}
    chosen = ResolvedComponent("accelerator", accelerator.name, accelerator, "")
    under = ResolvedComponent("strategy", entry.component.alias, strategy, "")
    check_needs(chosen, under)
    check_precision(chosen, under, ResolvedComponent("precision", precision.alias, precision, ""))


class SimBoard(SimAccelerator):
    """The simulator's hardware, with arithmetic of that width."""

    capabilities: ClassVar[frozenset[str]] = SimAccelerator.capabilities | {"acme_posit:16"}


@pytest.mark.parametrize("entry", STRATEGIES)
@pytest.mark.parametrize("accelerator", [Board, SimBoard])
@pytest.mark.parametrize("precision", [Posit, Declared, Precision], ids=["own_word", "own_dtypes", "nothing"])
def test_what_fits_is_accepted(entry, accelerator, precision):
    match(entry, accelerator(), precision())


@pytest.mark.parametrize("entry", STRATEGIES)
@pytest.mark.parametrize(
    ("precision", "lacking"), [(Posit, "acme_posit:16"), (Declared, "compute:bfloat16")], ids=["own_word", "own_dtypes"]
)
def test_what_is_missing_is_named(entry, precision, lacking):
    has = Narrow.capabilities | {"collective:all_gather", "collective:reduce_scatter"}
    narrow = type("Narrow", (Narrow,), {"capabilities": has})()
    with pytest.raises(UnsupportedCombinationError) as caught:
        match(entry, narrow, precision())
    assert f"needs {lacking}, which accelerator 'acme-narrow' doesn't have" in str(caught.value)


@pytest.mark.parametrize("entry", STRATEGIES)
def test_a_method_of_ones_own_is_called_or_refused(entry):
    alias = entry.component.alias
    if not alias.startswith(DOES_THE_STEP):
        match(entry, Board(), Deep())
        return
    with pytest.raises(UnsupportedCombinationError, match=rf"overrides .*optimizer_step\(\).*'{alias}' never calls"):
        match(entry, Board(), Deep())


@pytest.mark.parametrize("entry", STRATEGIES)
def test_cores_mixed_precision_is_carried(entry):
    """DeepSpeed's engine never calls most of its methods, and does their work itself."""
    if entry.component.alias.startswith("ipu"):
        with pytest.raises(UnsupportedCombinationError, match=r"overrides backward\(\)"):
            match(entry, Board(), MixedPrecision("bfloat16"))
        return
    match(entry, Board(), MixedPrecision("bfloat16"))


@pytest.mark.parametrize("alias", ["zero2", "zero3"])
def test_sharding_needs_its_collectives(alias):
    with pytest.raises(UnsupportedCombinationError, match=r"needs collective:all_gather, collective:reduce_scatter"):
        match(registry.find("strategy", alias), Narrow(), Precision())


@pytest.mark.parametrize(
    ("alias", "refused"),
    [
        ("bagua", store(BF16) | store(F64)),
        ("hivemind", store(F64) | {"loss_scaling"}),
        ("deepspeed_stage_2", store(F64) | store(BF16) | store(F16)),
        ("ddp", frozenset()),
    ],
)
def test_engines_say_what_they_cannot_carry(alias, refused):
    entry = registry.find("strategy", alias)
    capabilities = STANDARD | compute(F64) | store(F64)
    accelerator = type("Wide", (Board,), {"capabilities": capabilities})()
    for capability in sorted(store(F64, F32, F16, BF16) | autocast(F16, BF16) | {"loss_scaling"}):
        precision = Precision()
        precision.needs = frozenset({capability})
        if capability in refused:
            with pytest.raises(UnsupportedCombinationError, match=f"needs {capability}, which strategy '{alias}'"):
                match(entry, accelerator, precision)
        else:
            match(entry, accelerator, precision)


@pytest.mark.parametrize("precision", ["hpu-fp8", "ipu-16-mixed", "tf32"])
@pytest.mark.parametrize("accelerator", ["cpu", "gpu", "hpu", "ipu", "sim", "tpu", "xla", "xpu", "mps"])
def test_vendors_precisions_fit_their_own_accelerator(precision, accelerator):
    own = {"hpu-fp8": "hpu", "ipu-16-mixed": "ipu", "tf32": "gpu"}[precision]
    needs = registry.find("precision", precision).create().needs
    assert (needs <= registry.find("accelerator", accelerator).load().capabilities) == (accelerator == own)


ALIASES = ("32-true", "64-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed")
WIDTHS = {
    "cpu": ALIASES,
    "gpu": ALIASES,
    "xla": ALIASES,
    "sim": ("32-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed"),
    "xpu": ("32-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed"),
    "mps": ("32-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed"),
    "hpu": ("32-true", "bf16-true", "bf16-mixed"),
    "tpu": ("32-true", "bf16-true", "bf16-mixed"),
    "ipu": ("32-true", "16-true"),
}


@pytest.mark.parametrize("accelerator", WIDTHS)
def test_accelerators_have_what_cores_precisions_need(accelerator):
    has = registry.find("accelerator", accelerator).load().capabilities
    fits = [alias for alias in ALIASES if registry.find("precision", alias).create().needs <= has]
    assert fits == [alias for alias in ALIASES if alias in WIDTHS[accelerator]]
