"""Check collectives with every dtype and layout, and with nests of containers, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from torchhal.strategies import Strategy
from torchhal_conformance._assertions import close, require, same
from torchhal_conformance._generated_inputs import EXAMPLES, for_each, nests, tensors
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance._tensor_specs import (
    ALL_DTYPES,
    COMPLEX,
    FLOATS,
    INTEGERS,
    NestSpec,
    TensorSpec,
    layouts_of,
    parts,
    stored_dtypes,
)

CONTAINERS: Final = ("list", "tuple", "dict", "OrderedDict", "Pair", "Sample")
TOLERANCE: Final = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of a reduced value, relative to the greatest; 1e-6 for other dtypes."""
OPS: Final = ("sum", "mean", "avg", "min", "max", "product")
LARGE: Final = 3
"""Ranks of a world in which not all examples run: each takes milliseconds on every core."""
SHAPES: Final[tuple[tuple[int, ...], ...]] = ((), (2, 3), (0, 3))


def expected_reduction(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return what ``Strategy.reduce`` promises for these tensors, one of each rank."""
    stacked = torch.stack([tensor.detach().resolve_conj().resolve_neg() for tensor in tensors])
    dtype = stacked.dtype
    whole = not dtype.is_floating_point and not dtype.is_complex
    if op in ("mean", "avg"):
        total = (
            stacked.to(torch.int64) if whole else stacked.to(torch.complex128 if dtype.is_complex else torch.float64)
        )
        return (total.sum(0) / len(tensors)).to(torch.get_default_dtype() if whole else dtype)
    if op in ("min", "max"):
        wide = stacked.to(torch.int64) if whole else stacked.double()
        return (wide.amin(0) if op == "min" else wide.amax(0)).to(dtype)
    wide = stacked.to(torch.int64 if whole else torch.complex128 if dtype.is_complex else torch.float64)
    result = wide.sum(0) if op == "sum" else wide.prod(0)
    return result if whole else result.to(dtype)


def require_reduction(what: str, got: Any, tensors: Sequence[torch.Tensor], op: str) -> None:
    """Fail unless ``got`` is the reduction of these tensors, in dtype, shape and value."""
    expected = expected_reduction(tensors, op)
    require(isinstance(got, torch.Tensor), f"{what}: a tensor became a {type(got).__name__}")
    same(f"{what}: (dtype, shape)", (got.dtype, tuple(got.shape)), (expected.dtype, tuple(expected.shape)))
    if not got.is_floating_point() and not got.is_complex():
        same(what, got, expected)
        return
    parts_of: Callable[[torch.Tensor], torch.Tensor] = torch.view_as_real if got.is_complex() else lambda one: one
    tolerance = TOLERANCE.get(got.dtype, 1e-6)
    close(what, parts_of(got.detach().cpu().resolve_conj()), parts_of(expected), tolerance)


def usable(device: torch.device, dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Return those of ``dtypes`` that the device stores whole, and in which torch itself can add there."""
    found = []
    for dtype in stored_dtypes(device, dtypes):
        try:
            values = TensorSpec(dtype).build().to(device)
            (values | values if dtype is torch.bool else values + values).cpu()
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        found.append(dtype)
    return found


def reduced_tensors(rank: RankContext, strategy: Strategy) -> None:
    """Check ``reduce`` with each op in each dtype, with each layout, and with generated tensors."""

    def each(example: tuple[str, TensorSpec]) -> None:
        op, spec = example
        mine = spec.build(rank.rank)
        got = strategy.reduce(mine, op)
        same("the input after reduce", mine.detach(), spec.build(rank.rank).detach())
        same("device type of the result", got.device.type, strategy.root_device.type)
        require(not got.requires_grad, "the result has a graph")
        require_reduction(f"reduce(op={op!r})", got, [spec.build(r) for r in range(rank.size)], op)

    from hypothesis import strategies as st

    real = usable(strategy.root_device, (*FLOATS, *INTEGERS))
    dtypes = [*real, *usable(strategy.root_device, COMPLEX)]
    corners: list[tuple[str, TensorSpec]] = [(op, TensorSpec(dtype)) for dtype in real for op in OPS]
    corners += [
        (op, TensorSpec(dtype, shape, layout))
        for dtype in dtypes
        for layout in layouts_of(dtype)
        for op, shape in (("sum", (2, 3)), *((("mean", ()), ("sum", (0, 3))) if layout == "contiguous" else ()))
    ]
    generated = st.tuples(st.sampled_from(OPS), tensors(real))
    for_each("op and tensor", each, corners=_for_world(rank, corners), generated=generated, seed=rank.component.seed,
             examples=EXAMPLES if rank.size < LARGE else 0, agree=rank.gather)  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        if torch.float64 in real:
            for_each("op and tensor under a default dtype of float64", each,
                     corners=[("mean", TensorSpec(dtype)) for dtype in real], agree=rank.gather)  # fmt: skip
    finally:
        torch.set_default_dtype(before)


def reduced_nests(rank: RankContext, strategy: Strategy) -> None:
    """Check ``reduce`` with tensors in containers in containers."""

    def each(spec: NestSpec) -> None:
        mine = spec.build(rank.rank)
        got = list(parts(strategy.reduce(mine, "max")))
        everybody = [list(parts(spec.build(r))) for r in range(rank.size)]
        same("places in the result", [path for path, _ in got], [path for path, _ in everybody[0]])
        for index, (path, value) in enumerate(got):
            given = everybody[0][index][1]
            if isinstance(given, torch.Tensor):
                require_reduction(f"the maximum at {path or 'the top'}", value, [r[index][1] for r in everybody], "max")
            else:
                same(f"type of value{path}", type(value), type(given))
                if isinstance(given, str | int | float):
                    same(f"value{path}", value, given)
        same("the input after reduce", mine, spec.build(rank.rank))

    generated = nests(tensors([torch.float32]), containers=CONTAINERS)
    for_each("a nest", each, corners=_for_world(rank, _nests(TensorSpec())), generated=generated,
             seed=rank.component.seed, examples=20 if rank.size < LARGE else 0, agree=rank.gather)  # fmt: skip


def broadcast_values(rank: RankContext, strategy: Strategy) -> None:
    """Check ``broadcast`` with tensors of every dtype and layout, and with nests, from each rank."""

    def each(example: tuple[int, Any]) -> None:
        src, spec = example
        mine = spec.build(rank.rank) if rank.rank == src else None
        got = strategy.broadcast(mine, src)
        for (path, value), (_, expected) in zip(parts(got), parts(spec.build(src)), strict=True):
            same(f"type of value{path}", isinstance(value, torch.Tensor), isinstance(expected, torch.Tensor))
            if isinstance(expected, torch.Tensor):
                same(f"device type of value{path}", value.device.type, "cpu")
                same(f"value{path} from rank {src}", value.detach(), expected.detach())
            else:
                same(f"type of value{path}", type(value), type(expected))
        if mine is not None:
            for (path, value), (_, expected) in zip(parts(mine), parts(spec.build(src)), strict=True):
                if isinstance(expected, torch.Tensor):
                    same(f"value{path} on the sender, afterwards", value.detach(), expected.detach())

    last = rank.size - 1
    corners: list[tuple[int, Any]] = [
        (last, TensorSpec(dtype, shape, layout))
        for dtype in ALL_DTYPES
        for layout in layouts_of(dtype)
        for shape in (SHAPES if layout == "contiguous" else SHAPES[1:2])
    ]
    corners += [(number % rank.size, nest) for number, nest in enumerate(_nests(TensorSpec(torch.float64)))]
    for_each("source and value", each, corners=_for_world(rank, corners), agree=rank.gather)


def gathered_tensors(rank: RankContext, strategy: Strategy) -> None:
    """Check ``all_gather`` with each dtype, layout and shape, and that no later call changes a result."""
    kept: list[tuple[TensorSpec, torch.Tensor]] = []

    def gathered(spec: TensorSpec) -> torch.Tensor:
        return torch.stack([spec.build(r).detach().resolve_conj().resolve_neg() for r in range(rank.size)])

    def each(spec: TensorSpec) -> None:
        mine = spec.build(rank.rank)
        got = strategy.all_gather(mine)
        same("the input after all_gather", mine.detach(), spec.build(rank.rank).detach())
        same("device type of the result", got.device.type, strategy.root_device.type)
        same("what was gathered", got.detach().cpu(), gathered(spec))
        for earlier, result in kept[-2:]:
            same(f"what was gathered before, of {earlier}", result.detach().cpu(), gathered(earlier))
        kept.append((spec, got))

    dtypes = usable(strategy.root_device, (*FLOATS, *COMPLEX, *INTEGERS))
    corners = [
        TensorSpec(dtype, shape, layout)
        for dtype in dtypes
        for layout in layouts_of(dtype)
        for shape in (SHAPES if layout in ("contiguous", "transposed") else SHAPES[1:2])
    ]
    again = [TensorSpec(torch.float32, (3,)), TensorSpec(torch.float32, (3,), "middle")]
    for_each("a tensor", each, corners=[*again, *_for_world(rank, corners)], generated=tensors(dtypes),
             seed=rank.component.seed, examples=20 if rank.size < LARGE else 0, agree=rank.gather)  # fmt: skip


def _for_world(rank: RankContext, corners: Sequence[Any]) -> list[Any]:
    """Return the corner cases for this world: in a large one each dtype, each layout of float32, and flat nests."""
    return [one for one in corners if rank.size < LARGE or _depends_on_world(one)]


def _depends_on_world(corner: Any) -> bool:
    """Whether another number of ranks may change what becomes of an input: not by its layout, nor by its depth."""
    spec = corner[1] if isinstance(corner, tuple) else corner
    if isinstance(spec, NestSpec):
        return not any(isinstance(child, NestSpec) for child in spec.items)
    return spec.layout == "contiguous" or spec.dtype is torch.float32


def _nests(leaf: TensorSpec) -> list[NestSpec]:
    alone = [NestSpec(name, (leaf, "text")) for name in CONTAINERS]
    return [
        *alone,
        *(NestSpec(outer, (NestSpec(inner, (leaf, None)), 7)) for outer in CONTAINERS for inner in CONTAINERS),
        NestSpec("list"), NestSpec("dict", (NestSpec("tuple"),)),
    ]  # fmt: skip
