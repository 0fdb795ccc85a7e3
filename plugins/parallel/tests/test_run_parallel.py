"""Loops of a user's own, by torchhal.Run, on models that the ranks divide."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "core" / "tests"))

import run_loops
import torch

import torchhal


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


def test_an_optimizer_has_the_whole_parameters_again_after_a_divided_run(world2):
    assert world2.run(_step_afterwards) == [True, True]


def _step_afterwards():
    model = run_loops.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torchhal.Run(accelerator="cpu", strategy="zero3", devices=2) as run:
        run.setup(model, optimizer)
        run.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
    before = model.head.weight.detach().clone()
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return bool(optimizer.state_dict()["state"]) and not torch.equal(model.head.weight, before)


def _by_run(name, strategy, options=None):
    return run_loops.by_run(name, strategy, **(options or {}))
