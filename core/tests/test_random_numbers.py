"""The states of random-number generators tell which of them have drawn."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from torchhal import rng


@pytest.mark.parametrize(
    "draw, names",
    [
        (lambda: None, []),
        (random.random, ["python"]),
        (random.gauss, ["python"]),
        (lambda: torch.rand(1), ["torch"]),
        (numpy.random.rand, ["numpy"]),
        (lambda: (random.random(), torch.rand(1)), ["python", "torch"]),
    ],
)
def test_which_have_drawn(draw: Callable[[], object], names: list[str]) -> None:
    before = rng.collect_host()
    draw()
    after = rng.collect_host()
    assert rng.drawn_between(before, after) == names
    rng.restore_host(before)
    assert rng.drawn_between(before, rng.collect_host()) == []


def test_a_generator_that_was_imported_in_between() -> None:
    after = rng.collect_host()
    before = {name: state for name, state in after.items() if name != "numpy"}
    assert rng.drawn_between(before, after) == []
