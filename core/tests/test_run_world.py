"""Loops of a user's own on two ranks train what one process of plain PyTorch trains."""

import pytest
import run_loops
import torch
from torch.utils.data import DataLoader

import torchhal
from torchhal.errors import ConfigurationError


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


def test_the_last_round_of_an_evaluation_has_some_ranks(world2):
    """5 samples on 2 ranks: rank 1 has no third batch. It takes part in what rank 0 does there, and in its break."""
    (first, second) = world2.run(_evaluate_unevenly)
    assert first == {"seen": 3, "gathered": [0, 1, 2, 3, 4], "left": 3, "refused": True}
    assert second == {"seen": 2, "gathered": [0, 1, 3, 4], "left": 2, "refused": False}


def _evaluate_unevenly():
    model = run_loops.net()
    run = torchhal.Run(accelerator="cpu", strategy="ddp", devices=2, log_every_n_steps=1)
    loader = DataLoader(torch.arange(5), batch_size=1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen, gathered, refused = 0, [], False
    for batch in run.evaluation_batches(loader):
        gathered += run.gather(batch).tolist()
        run.log({"seen": float(seen)})
        seen += 1
        try:
            run.barrier("all")
        except ConfigurationError:
            refused = True
    left = 0
    for _ in run.evaluation_batches(loader):
        left += 1
        if left == 3:
            break
    run.backward(model(torch.ones(1, 8)).sum())  # which both ranks take part in
    run.end()
    return {"seen": seen, "gathered": sorted(gathered), "left": left, "refused": refused}


def test_a_plateau_scheduler_sees_the_mean_of_the_ranks(world2):
    assert world2.run(_plateau) == [[1.0, 1.0, 0.1]] * 2


def _plateau():
    model = run_loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    run = torchhal.Run(accelerator="cpu", strategy="ddp", devices=2)
    run.setup(model, optimizer, scheduler)
    rates = []
    for mine in ([3.0, 2.0, 3.0], [3.0, 2.5, 2.6])[run.global_rank]:  # rank 1 alone would wait once more
        scheduler.step(metrics=mine)
        rates.append(round(optimizer.param_groups[0]["lr"], 6))
    run.end()
    return rates


def _by_run(name, strategy, options=None):
    return run_loops.by_run(name, strategy, **(options or {}))


def _as_rank_0(found, reference):
    """A rank without a batch in the last round of an evaluation doesn't gather there: rank 0 has them all."""
    losses = [mine if mine is not None else other for mine, other in zip(found[0], reference[0], strict=True)]
    return losses, found[1]
