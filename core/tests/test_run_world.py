"""Loops of a user's own on two ranks train what one process of plain PyTorch trains."""

import pytest
import run_loops


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_under_ddp_is_the_plain_one(world2, accumulate):
    """An accumulation of 3 ends short with the 5 batches of an epoch."""
    reference = run_loops.by_plain("regression", accumulate)
    for found in world2.run(_by_run, "regression", "ddp", {"accumulate": accumulate}):
        run_loops.same(_as_rank_0(found, reference), reference)


@pytest.mark.parametrize("name", ["gan", "distillation"])
def test_several_models_under_ddp_are_those_of_the_plain_loop(world2, name):
    reference = run_loops.by_plain(name)
    for found in world2.run(_by_run, name, "ddp"):
        run_loops.same(found, reference)


def test_forward_backward_under_ddp_is_the_plain_loop(world2):
    reference = run_loops.by_plain("regression", whole=True)
    for found in world2.run(_by_run, "regression", "ddp", {"whole": True}):
        run_loops.same(found, reference)


def _by_run(name, strategy, options=None):
    return run_loops.by_run(name, strategy, **(options or {}))


def _as_rank_0(found, reference):
    """A rank without a batch in the last round of an evaluation doesn't gather there: rank 0 has them all."""
    losses = [mine if mine is not None else other for mine, other in zip(found[0], reference[0], strict=True)]
    return losses, found[1]
