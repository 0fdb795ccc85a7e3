"""Loops of a user's own, by torchhal.Run, on DeepSpeed's engine."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "core" / "tests"))

import run_loops


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_loop_is_the_plain_one(world2, strategy, whole):
    reference = run_loops.by_plain("regression", whole=whole)
    run_loops.same(world2.run(_by_run, strategy, {"whole": whole}, timeout=120)[0], reference)


@pytest.mark.slow
def test_an_accumulation_is_that_of_the_plain_loop(world2):
    reference = run_loops.by_plain("regression", 5)
    run_loops.same(world2.run(_by_run, "deepspeed_stage_2", {"accumulate": 5}, timeout=120)[0], reference)


def _by_run(strategy, options):
    return run_loops.by_run("regression", strategy, gradient_clip_val=0.5, **options)
