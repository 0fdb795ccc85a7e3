"""Test that the trials of ACC-16 report a collective that fails or is wrong."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from torchhal.accelerators import CPUAccelerator
from torchhal_conformance import ComponentUnderTest
from torchhal_conformance.checks._capability_trials import try_collectives

OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "avg", "reduce_scatter")


@pytest.fixture
def cpu():
    return ComponentUnderTest.of("accelerator", CPUAccelerator)


def test_collectives_of_gloo_are_there(cpu):
    assert try_collectives(cpu, [*OPERATIONS, "of_a_vendor"]) == {}
    assert not dist.is_initialized()


def test_a_collective_that_raises_is_named(cpu, monkeypatch):
    def unsupported(*args):
        raise RuntimeError("not supported by this backend")

    monkeypatch.setattr(dist, "reduce_scatter_tensor", unsupported)
    failed = try_collectives(cpu, OPERATIONS)
    assert failed == {"reduce_scatter": "RuntimeError: not supported by this backend"}


def test_a_collective_with_a_wrong_result_is_named(cpu, monkeypatch):
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda result, given: None)
    assert list(try_collectives(cpu, OPERATIONS)) == ["all_gather"]
