"""What happens around a step is that of ddp: buffers, pauses, state that is there before, what is left after a run."""

import colossalai_steps as steps
import pytest
import torch

pytestmark = [pytest.mark.usefixtures("colossalai"), pytest.mark.timeout(240)]

ZERO = ("zero1", "zero2")
ALL = ("colossalai", *ZERO)


def same(results, reference, names=None, tolerance=0.0):
    """Assert equal losses on each rank, and equal values of ``names``: of all but buffers, unless said."""
    for mine, other in zip(results, reference, strict=True):
        assert mine["losses"] == pytest.approx(other["losses"], rel=tolerance or 1e-12)
        for name in names or [each for each in other["state"] if "running" not in each and "num_" not in each]:
            assert torch.allclose(mine["state"][name], other["state"][name], rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_buffers_that_a_step_and_a_validation_read_are_those_of_ddp(world2, strategy, accumulate):
    names = [name for name, _ in steps.ReadsBuffers().named_parameters()]
    ours = world2.run(steps.reads_buffers, strategy, accumulate)
    same(ours, world2.run(steps.reads_buffers, "ddp", accumulate), names)


@pytest.mark.parametrize("strategy", ZERO)
def test_a_graph_that_has_saved_a_buffer_runs_backward_after_the_next_step_began(world2, strategy):
    same(world2.run(steps.keeps_graph, strategy), world2.run(steps.keeps_graph, "ddp"))


@pytest.mark.parametrize("strategy", ZERO)
def test_an_optimizer_that_comes_with_state(world2, strategy):
    same(world2.run(steps.loaded_state, strategy), world2.run(steps.loaded_state, "ddp"))


@pytest.mark.parametrize("strategy", ZERO)
def test_a_second_fit_with_the_same_optimizer(world2, strategy):
    same(world2.run(steps.same_optimizer, strategy), world2.run(steps.same_optimizer, "ddp"))


@pytest.mark.parametrize("strategy", ZERO)
def test_a_second_fit_with_the_same_optimizer_on_three_ranks(world3, strategy):
    options = {"devices": 3, "batch": 2}
    ours, reference = (world3.run(steps.same_optimizer, each, options) for each in (strategy, "ddp"))
    same(ours, reference, tolerance=1e-5)


@pytest.mark.parametrize("strategy", ZERO)
def test_the_order_in_memory_is_that_of_before(world2, strategy):
    for (before, after, moments, alone, result), (*_, reference) in zip(
        world2.run(steps.orders, strategy), world2.run(steps.orders, "ddp"), strict=True
    ):
        assert before == after and alone
        assert moments in ({}, before)  # rank 0 has them
        same([result], [reference], tolerance=1e-5)  # contiguous weights are convolved in another order


@pytest.mark.parametrize("strategy", ZERO)
def test_gradients_of_what_is_frozen_in_an_accumulation_are_averaged(world2, strategy):
    ours = world2.run(steps.frozen_in_accumulation, strategy)
    same(ours, world2.run(steps.frozen_in_accumulation, "ddp"))


@pytest.mark.parametrize("strategy", ALL)
def test_a_copy_of_the_model_made_in_a_run_is_a_plain_one(world2, strategy):
    reference = world2.run(steps.copies, "ddp")
    for (result, count, own, cleared, apart), (other, *_) in zip(
        world2.run(steps.copies, strategy), reference, strict=True
    ):
        assert count == 2 and own and cleared and apart
        same([result], [other])


@pytest.mark.parametrize("strategy", ZERO)
def test_a_zero_grad_on_the_object_is_there_after_a_run(world2, strategy):
    assert world2.run(steps.own_zero_grad, strategy) == [True, True]


@pytest.mark.parametrize("strategy", ZERO)
def test_parameters_that_ddp_is_told_to_ignore_are_refused(world2, strategy):
    for error in world2.run(steps.error_of, strategy, "Ignored"):
        assert error.startswith("ModelError") and "is to train 'body.2.weight' of Ignored by itself" in error, error


@pytest.mark.parametrize("model", ["HookedStep", "HookedLater"])
def test_a_hook_before_the_step_is_refused_where_it_has_no_gradients(world2, model):
    same(world2.run(steps.train, "zero1", model), world2.run(steps.train, "ddp", model))
    told = "'HookedStep.clip' is registered to run before the step of Adam"
    for error in world2.run(steps.error_of, "zero2", model):
        assert error.startswith("ModelError") and told in error, error


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_hooks_after_the_step_see_and_change_whole_weights(world2, strategy, precision):
    options = {"precision": precision, "max_epochs": 2}
    ours, reference = (world2.run(steps.hooked_after, each, options) for each in (strategy, "ddp"))
    for (result, averages), (other, expected) in zip(ours, reference, strict=True):
        same([result], [other])
        assert all(map(torch.equal, averages, expected))


@pytest.mark.parametrize("strategy", ZERO)
def test_the_trial_of_an_optimizer_draws_no_random_numbers_of_the_run(world2, strategy):
    assert world2.run(steps.drawn, strategy) == world2.run(steps.drawn, "ddp")
