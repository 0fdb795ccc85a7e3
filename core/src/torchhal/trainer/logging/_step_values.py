"""Exchange the values of steps between ranks, for jobs in which steps do not end on rank 0."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch

from torchhal.strategies.base import STEPS
from torchhal.trainer.logging._log_options import decide
from torchhal.trainer.logging._metric_accumulators import MetricAccumulator
from torchhal.trainer.logging._metric_payloads import join_numbers, to_host
from torchhal.trainer.logging._metric_views import ALL_READERS, RANKS

Step = tuple[str, str, int | None, tuple[Any, ...], torch.dtype, float]
"""The value of a step as plain data: name, hook, dataloader, the options as given, dtype, number."""


def pack_steps(accumulators: Iterable[MetricAccumulator], *, is_data_leader: bool) -> list[Step]:
    """Return the values of training steps that were logged since the last call, as plain data.

    Args:
        accumulators: of this rank.
        is_data_leader: False for a rank whose values another rank sends: they only count as sent.
    """
    unsent = []
    for accumulator in {id(each): each for each in accumulators}.values():
        if accumulator.unseen & RANKS and accumulator.stage == "train":
            accumulator.unseen &= ~RANKS
            if not accumulator.borrowed:
                unsent.append(accumulator)
    if not is_data_leader:
        return []
    numbers = to_host([accumulator.step for accumulator in unsent])
    return [
        (*accumulator.identity, accumulator.asked, accumulator.dtype, number)
        for accumulator, number in zip(unsent, numbers, strict=True)
    ]


def take_steps(
    accumulators: MutableMapping[Any, MetricAccumulator], steps_of_ranks: list[list[Step]], leader: int
) -> None:
    """Take the leader's values of steps where this rank has none of its own, and the synced ones everywhere.

    Args:
        accumulators: of this rank, by name, hook and dataloader; those of keys that it has not logged are added.
        steps_of_ranks: the :func:`pack_steps` of each rank.
        leader: the first data leader.
    """
    numbers_of_ranks: dict[Any, list[Any]] = {}
    for steps in steps_of_ranks:
        for name, hook, index, _, _, number in steps:
            numbers_of_ranks.setdefault((name, hook, index), []).append(number)
    for name, hook, index, asked, dtype, number in steps_of_ranks[leader]:
        accumulator = accumulators.get((name, hook, index))
        if accumulator is None:
            accumulator = accumulators[name, hook, index] = MetricAccumulator(
                name, hook, index, asked, decide(name, hook, asked)
            )
            accumulator.borrowed = True
        if accumulator.options.sync_step and hook in STEPS:
            number = join_numbers(accumulator.options.reduction, numbers_of_ranks[name, hook, index])
        elif not accumulator.borrowed:
            continue
        accumulator.step, accumulator.dtype = number, dtype
        accumulator.unseen = ALL_READERS & ~RANKS
