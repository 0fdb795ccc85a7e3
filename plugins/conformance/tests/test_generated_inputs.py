"""Generated inputs: the same seed gives the same, a failure shows the smallest, all ranks draw alike."""

from __future__ import annotations

import random

import pytest
import torch

from torchhal_conformance._assertions import same
from torchhal_conformance._check import CheckFailed, NotApplicable
from torchhal_conformance._generated_inputs import for_each, nests, tensors
from torchhal_conformance._tensor_specs import ALL_DTYPES, CONTAINERS, NestSpec, Pair, TensorSpec, layouts_of, parts


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_tensor_has_described_layout(dtype: torch.dtype) -> None:
    for layout in layouts_of(dtype):
        for shape in ((), (0, 3), (2, 3), (2, 1, 3)):
            made = TensorSpec(dtype, shape, layout).build()
            assert (made.dtype, tuple(made.shape)) == (dtype, shape)
            assert made.is_conj() == (layout == "conjugated") and made.is_neg() == (layout == "negated")
            assert made.requires_grad == (layout in ("requires_grad", "parameter"))
        matrix = TensorSpec(dtype, (2, 3), layout).build()
        strided = ("transposed", "stepped", "expanded")
        assert matrix.is_contiguous() == (layout not in strided) or layout == "negated"
        assert (matrix.storage_offset() > 0) == (layout == "middle") or layout in ("conjugated", "negated")
        same("values of another number", TensorSpec(dtype, (2, 3), layout).build(), matrix)


def test_values_need_their_dtype() -> None:
    for wide, narrow in ((torch.float64, torch.float32), (torch.complex128, torch.complex64)):
        made = TensorSpec(wide).build()
        assert not torch.equal(made.to(narrow).to(wide), made)
    made = TensorSpec(torch.int64).build()
    assert not torch.equal(made.double().long(), made)


@pytest.mark.parametrize("name", CONTAINERS)
def test_nest_is_rebuilt_alike(name: str) -> None:
    spec = NestSpec(name, (TensorSpec(), NestSpec("tuple", (None, 7))))
    same("a nest", spec.build(), spec.build())
    with pytest.raises(CheckFailed):
        same("a nest", spec.build(1), spec.build(0))


def drawn(seed: int) -> list[str]:
    seen: list[str] = []
    for_each("a nest", lambda spec: seen.append(repr(spec)), generated=nests(tensors()), seed=seed, examples=15)
    return seen


def test_seed_decides_what_is_drawn() -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    assert drawn(3) == drawn(3) != drawn(4)
    assert len(drawn(3)) >= 10
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def no_deep_pair(spec: NestSpec) -> None:
    for path, value in parts(spec.build()):
        if isinstance(value, Pair) and path:
            raise CheckFailed("a Pair in a container")


def test_failure_shows_smallest_input_in_one_line() -> None:
    with pytest.raises(CheckFailed) as raised:
        for_each("a nest", no_deep_pair, generated=nests(tensors()), examples=300, seconds=60)
    text = str(raised.value)
    assert text.startswith("a Pair in a container [a nest: ") and "\n" not in text
    assert len(text) < 80, text


def test_corner_cases_come_first_and_errors_count() -> None:
    seen: list[int] = []

    def function(value: int) -> None:
        seen.append(value)
        if value == 2:
            raise RuntimeError("two")

    with pytest.raises(CheckFailed, match=r"RuntimeError: two \[a number: 2\]"):
        for_each("a number", function, corners=[1, 2, 3], generated=tensors())
    assert seen == [1, 2]


def test_skip_is_no_failure() -> None:
    def function(value: int) -> None:
        raise NotApplicable("nothing here")

    with pytest.raises(NotApplicable):
        for_each("a number", function, corners=[1])


def test_other_ranks_problem_is_everybodys() -> None:
    with pytest.raises(CheckFailed, match=r"rank 1 failed \[a number: 5\]"):
        for_each("a number", lambda value: None, corners=[5], agree=lambda mine: [mine, "rank 1 failed"])


def test_time_ends_generation_but_no_corner_case() -> None:
    seen: list[object] = []
    for_each("a number", seen.append, corners=[1, 2], generated=tensors(), seconds=-1.0)
    assert seen == [1, 2]
