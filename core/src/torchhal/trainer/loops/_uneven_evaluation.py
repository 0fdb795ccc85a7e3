"""Evaluate with steps that communicate, over ranks that have different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchhal.errors import ModelError
from torchhal.strategies.base import Strategy


class UnevenEvaluation:
    """Steps of an evaluation in which every rank takes part as long as any rank has a batch.

    Args:
        strategy: one whose evaluation communicates.
        batches: how many each rank has; None for a loader without a length: then the ranks communicate before each
            step.
    """

    def __init__(self, strategy: Strategy, batches: Sequence[int] | None) -> None:
        self.strategy = strategy
        self.batches = batches
        self.position = 0

    def step(self, step: Callable[..., Any], *args: Any) -> Any:
        """Return what ``step`` gives for a batch of this rank."""
        ranks = self._next(True)
        if len(ranks) == self.strategy.world_size:
            return step(*args)
        with self.strategy.evaluation_step_of(ranks):
            return step(*args)

    def rest(self) -> Iterator[None]:
        """Take part in the steps of other ranks after the last one of this rank."""
        while ranks := self._next(False):
            with self.strategy.evaluation_step_of(ranks):
                pass
            yield

    def _next(self, mine: bool) -> list[int]:
        """Return the ranks that have a batch for the next step."""
        if self.batches is None:
            have = self.strategy.all_gather_object(mine)
        else:
            have = [count > self.position for count in self.batches]
            if have[self.strategy.global_rank] is not mine:
                raise ModelError(
                    f"a loader has said that it has {self.batches[self.strategy.global_rank]} batches, and gave "
                    f"{'more' if mine else self.position}: its __len__ must be right, or missing"
                )
        self.position += 1
        return [rank for rank, there in enumerate(have) if there]
