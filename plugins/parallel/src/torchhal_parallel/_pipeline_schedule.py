"""Choose a microbatch schedule of ``torch.distributed.pipelining``, check its sizes, and keep one for each shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal_parallel._lru_cache import LRUCache
from torchhal_parallel._stage import StagedForward, StageRoot

SCHEDULES: Final[Mapping[str, Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}

KEPT_SCHEDULES = 8
"""Shapes of batches whose schedules are kept, as each holds the memory of what it receives."""


class ScheduleCache:
    """The schedules of this rank's stages, one for each forward that was split into stages.

    Args:
        name: one of :data:`SCHEDULES`.
        roots: this rank's stages, by their indices.
        group: the process group of the pipeline.
        device: of this rank.
        microbatches: into which a schedule divides each batch.
    """

    def __init__(
        self,
        name: str,
        roots: Mapping[int, StageRoot],
        *,
        group: Any,
        device: torch.device,
        microbatches: int,
    ) -> None:
        self._name = name
        self._roots = roots
        self._group = group
        self._device = device
        self._microbatches = microbatches
        self._loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
        self._kept = LRUCache(KEPT_SCHEDULES)

    def __len__(self) -> int:
        return len(self._kept)

    def schedule_for(self, forward: StagedForward) -> Any:
        """Return the schedule that runs ``forward``, made at its first use."""
        # the forward that a schedule was made for is kept with it, so that its id remains its own
        return self._kept.get_or_make(id(forward), lambda: (forward, self._make(forward)))[1]

    def train(
        self,
        schedule: Any,
        inputs: tuple[torch.Tensor, ...],
        target: torch.Tensor,
        loss: Callable[[Any, torch.Tensor], torch.Tensor],
    ) -> None:
        """Run ``schedule`` on the rank of the last stage, with ``loss`` of each microbatch's output and target."""
        self._loss = loss
        try:
            schedule.step(*inputs, target=target, losses=[])
        finally:
            self._loss = None  # it holds the batch

    def _loss_of_microbatch(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(output, target)

    def _make(self, forward: StagedForward) -> Any:
        stages = [
            PipelineStage(
                root,
                index,
                len(forward.stages),
                self._device,
                input_args=forward.boundaries[index][0],
                output_args=forward.boundaries[index][1],
                group=self._group,
            )
            for index, root in self._roots.items()
        ]
        given: Any = stages if self._name == "interleaved_1f1b" else stages[0]
        return SCHEDULES[self._name](given, self._microbatches, loss_fn=self._loss_of_microbatch, scale_grads=False)


def check_schedule_name(schedule: str) -> None:
    """Raise ConfigurationError for a schedule that isn't there."""
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"'schedule' must be one of {', '.join(map(repr, SCHEDULES))} (got {schedule!r})")


def check_schedules_of_torch(schedule: str, alias: str) -> None:
    """Raise UnsupportedCombinationError on a torch whose schedule has no option to leave gradients as they are."""
    if "scale_grads" not in inspect.signature(SCHEDULES[schedule]).parameters:
        raise UnsupportedCombinationError(
            f"strategy {alias!r} computes the loss of a batch itself, and {SCHEDULES[schedule].__name__} of torch "
            f"{torch.__version__} has no argument 'scale_grads', without which it may divide gradients by the number "
            "of microbatches: use a newer torch, or strategy='zero3'"
        )


def check_schedule(schedule: str, stages: int, size: int, microbatches: int) -> None:
    """Raise ConfigurationError for numbers that don't fit each other, before anything starts."""
    if schedule == "interleaved_1f1b":
        if stages % size or stages == size:
            raise ConfigurationError(
                f"schedule 'interleaved_1f1b' needs several stages per process, the same number for each: {stages} "
                f"stages over {size} processes"
            )
    elif stages != size:
        raise ConfigurationError(
            f"schedule {schedule!r} needs one stage per process: {stages} stages (one more than 'split_points') and "
            f"{size} processes"
        )
    if schedule != "gpipe" and microbatches < stages:
        raise ConfigurationError(
            f"schedule {schedule!r} needs at least as many microbatches as stages: {microbatches} and {stages}"
        )
