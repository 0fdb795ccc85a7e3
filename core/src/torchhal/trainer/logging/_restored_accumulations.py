"""Hold the accumulations of a checkpoint until their keys are logged again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchhal.trainer.logging._metric_accumulators import MetricAccumulator
from torchhal.trainer.logging._metric_payloads import Payload, merge_by_key


class RestoredAccumulations:
    """Accumulations of this rank from a checkpoint, by stage, that no accumulator has continued yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Payload]] = {}

    def load(self, stages_of_ranks: Sequence[dict[str, list[Payload]]]) -> None:
        """Join the payloads of the saved ranks that this rank continues, by key."""
        for stages in stages_of_ranks:
            for stage, payloads in stages.items():
                self._waiting.setdefault(stage, []).extend(
                    {**payload, "identity": tuple(payload["identity"])} for payload in payloads
                )
        for payloads in self._waiting.values():
            payloads[:] = merge_by_key(payloads)

    def __iter__(self) -> Iterator[Payload]:
        for payloads in self._waiting.values():
            yield from payloads

    def by_stage(self) -> dict[str, list[Payload]]:
        """Return the payloads in a new list for each stage."""
        return {stage: list(payloads) for stage, payloads in self._waiting.items()}

    def pop(self, stage: str) -> list[Payload]:
        """Remove the payloads of ``stage`` and return them."""
        return self._waiting.pop(stage, [])

    def restore(self, accumulator: MetricAccumulator) -> None:
        """Move the accumulation of the key of ``accumulator``, if there is one, into it."""
        waiting = self._waiting.get(accumulator.stage, [])
        for payload in waiting:
            if payload["identity"] == accumulator.identity:
                accumulator.total, accumulator.weight = payload["total"], payload["weight"]
                waiting.remove(payload)
                return


def share_of(saved: list[Any], saved_leaders: list[bool], leaders: list[bool], rank: int) -> list[Any]:
    """Return those of the ``saved`` ranks that ``rank`` continues.

    With the same leaders each rank continues itself. Otherwise the saved leaders, which saw other samples each, are
    divided among the leaders of now: sums of several saved ranks add up in one, and a rank beyond the saved ones starts
    with nothing.

    Args:
        saved: the state of each saved rank.
        saved_leaders: for each saved rank whether it was a data leader.
        leaders: the same for the ranks of now.
        rank: the rank of this process.
    """
    if leaders == saved_leaders:
        return saved[rank : rank + 1]
    if not leaders[rank]:
        return []
    counted = [stages for stages, leads in zip(saved, saved_leaders, strict=True) if leads]
    return counted[sum(leaders[:rank]) :: sum(leaders)]
