"""Strategies that differ from core's in one defect each."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from zoo import caught_by

from torchhal.strategies import DDPStrategy, SingleDeviceStrategy

_log = logging.getLogger(__name__)


@caught_by("STR-87")
class GatheredErrorsStrategy(DDPStrategy):
    """When a run fails it gathers the errors of all ranks, to report them in one place."""

    # "Called once, after the callbacks' `on_exception`, with `failure` set where the ranks may be at different places;
    # it must not communicate then."
    # If one rank fails, the others are in an averaging of gradients: its gather is matched with that, or waits in vain,
    # and the error is hidden behind a hang until the timeout, or behind one of gloo's about sizes.

    def on_exception(self, error: BaseException) -> None:
        super().on_exception(error)
        if self.is_set_up and self.world_size > 1:
            errors = self.all_gather_object(f"{type(error).__name__}: {error}")
            if self.is_global_zero:
                _log.error("the run has failed: %s", "; ".join(f"rank {i}: {each}" for i, each in enumerate(errors)))


@caught_by("STR-85")
class CountedEvaluationStrategy(DDPStrategy):
    """After each batch of an evaluation it adds up over the ranks how many were evaluated."""

    # "Called after the hooks [...] on the ranks that have such a batch; it must not communicate."
    # With loaders of the user's own, of which one has a batch more, that rank waits for the others' next collective:
    # the evaluation hangs, or the sum is matched with one of the metrics'.

    evaluated_batches: int = 0

    def on_evaluation_batch_end(
        self, stage: str, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        super().on_evaluation_batch_end(stage, outputs, batch, batch_idx, dataloader_idx)
        self.evaluated_batches += self.reduce(1, "sum")


@caught_by("STR-88")
class KeptStepStrategy(SingleDeviceStrategy):
    """It builds the function of each step once and returns it to every later run, whatever the module."""

    # "`teardown` always, after errors too; then the same object may start again".
    # A second fit with the same Trainer and another model runs the first one's step: gradients go into the old model,
    # and the new one is never trained, without an error.

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._step_functions: dict[str, Callable[..., Any]] = {}

    def step_function(self, name: str) -> Callable[..., Any]:
        if name not in self._step_functions:
            self._step_functions[name] = super().step_function(name)
        return self._step_functions[name]


@caught_by("STR-70")
class ClippedNormStrategy(DDPStrategy):
    """It measures the norm of the gradients by clipping at infinity, which turns all into NaN if it is infinite."""

    # "Return the 2-norm over all gradients of `optimizer`, on any rank; nothing is changed."
    # One infinite gradient, or finite ones whose squares overflow float32, turn into NaN for every parameter: a run
    # that would have survived by clip_algorithm="value", or by a hook that zeroes what is infinite, dies once its norm
    # is logged.

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        norm = self.clip_gradients(optimizer, math.inf)
        assert norm is not None
        return norm


@caught_by("STR-61", says="beside rank 0")
class UnsyncedEvaluationStrategy(DDPStrategy):
    """It sends rank 0's weights to the other ranks for a fit, and not for an evaluation without one."""

    # "Called on every rank; afterwards all ranks have the parameters and buffers of rank 0."
    # validate, test and predict of a model that each rank has built or changed with random numbers of its own run a
    # different model on each rank, and the average of their metrics belongs to none.

    _for_training: bool = True

    def setup_model(self, *, training: bool = True) -> None:
        self._for_training = training
        super().setup_model(training=training)

    def sync_module(self, module: nn.Module) -> None:
        if self._for_training:  # the weights of an evaluation come from a checkpoint, which all ranks read
            super().sync_module(module)


@caught_by("STR-89")
class LoneWaitStrategy(DDPStrategy):
    """A save that failed in the background raises on the rank that saved, and the others don't learn of it."""

    # "`CheckpointError`: on every rank, when a save has failed on one of them; on that rank the save's own error."
    # When the disk is full, rank 0 leaves with its error, and a user who catches it there to save elsewhere is alone:
    # the others train on and wait for rank 0 in the next averaging, until the timeout.

    def wait_for_checkpoints(self) -> None:
        if self.is_global_zero or "sharded" in self.checkpoint_io.features:
            self.checkpoint_io.wait()


@caught_by("STR-92")
class EvenNodesStrategy(DDPStrategy):
    """It computes a rank's share of the data as if every node had as many devices as this one."""

    # "`num_replicas` and `rank` for a sampler"; "`rank` counts the shares of all nodes, not those of this node."
    # On nodes of four and two devices, ranks 4 and 5 take the shares 2 and 3: these samples are trained on twice as
    # often, two shares are never seen, and no number shows it.

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        return {
            "num_replicas": self.world_size,
            "rank": self.node_rank * max(1, len(self.devices)) + self.local_rank,
        }
