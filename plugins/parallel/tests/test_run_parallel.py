"""Loops of a user's own, by torchhal.Run, on models that the ranks divide."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "core" / "tests"))

import run_loops


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", ["regression", "gan", "distillation"])
def test_a_loop_is_the_plain_one(world2, name, strategy):
    reference = run_loops.by_plain(name)
    found = world2.run(_by_run, name, strategy)
    run_loops.same(found[0], reference)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_accumulation_is_that_of_the_plain_loop(world2, strategy):
    reference = run_loops.by_plain("regression", 3)
    run_loops.same(world2.run(_by_run, "regression", strategy, {"accumulate": 3})[0], reference)


@pytest.mark.parametrize("whole", [False, True])
def test_tensor_parallel_is_the_plain_loop(world2, whole):
    reference = run_loops.by_plain("regression", **({"whole": True} if whole else {}))
    found = world2.run(_by_run, "regression", "tensor_parallel", {"ranks_share_data": False, "whole": whole})
    run_loops.same(found[0], reference)


def test_a_pipeline_trains_by_forward_backward(world2):
    reference = run_loops.by_plain("regression", whole=True)
    (losses, state), (last, _) = world2.run(
        _by_run, "regression", "pipeline", {"ranks_share_data": False, "whole": True}
    )
    assert set(losses) == {None, 0.0}
    run_loops.same((last, state), reference)


def test_a_pipeline_refuses_a_model_that_is_called(world2):
    outcomes = world2.outcomes(_by_run, "regression", "pipeline", {"ranks_share_data": False})
    assert {each.error for each in outcomes} == {"ConfigurationError"}
    assert "forward_backward" in outcomes[0].message


def _by_run(name, strategy, options=None):
    return run_loops.by_run(name, strategy, **(options or {}))
