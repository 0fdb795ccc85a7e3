"""Tell a loop of the user's own which rank it is, and combine values of all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from torchhal.errors import ConfigurationError
from torchhal.run._batches import TrainingBatches
from torchhal.run._calls import Calls
from torchhal.run._evaluation import Evaluation
from torchhal.run._gathering import concatenate, gather_values
from torchhal.strategies import Strategy
from torchhal.trainer.run_state import RunState


class RunRanks(ABC):
    """The ranks of a run, its counters, and the values that ranks exchange."""

    _state: RunState
    _batches: TrainingBatches | None

    def _partial_round(self) -> Evaluation | None:
        """Return the evaluation that is in a round in which some ranks have no batch; else None."""
        batches = self._batches
        if batches is None or not batches.in_evaluation or batches.evaluation is None:
            return None
        return None if batches.evaluation.ranks is None else batches.evaluation

    def _all_ranks(self, name: str) -> TrainingBatches:
        """Return the batches of a run that is set up, for what all ranks have to take part in.

        Args:
            name: of the method.

        Raises:
            ConfigurationError: some ranks have no batch, and wait for what the others gather.
        """
        _, batches = self._ready()
        if self._partial_round() is not None:
            raise ConfigurationError(
                f"{name} in the last round of evaluation_batches, in which some ranks have no batch: gather or log "
                f"there, and call {name} behind the loop"
            )
        if not batches.in_evaluation:
            batches.end_evaluation()
        return batches

    @abstractmethod
    def _ready(self) -> tuple[Calls, TrainingBatches]:
        """Return the parts of a run that is set up; ConfigurationError before and after."""

    @property
    def _strategy(self) -> Strategy:
        return self._state.strategy

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._strategy.root_device

    @property
    def global_rank(self) -> int:
        """The number of this process in the job, from 0."""
        return int(self._strategy.global_rank)

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self._state.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._state.is_global_zero

    @property
    def global_step(self) -> int:
        """Optimizer steps taken, those of the runs that this one continues included."""
        return self._state.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs that have ended, which is the index of the running one."""
        return self._state.current_epoch if self._batches is None else self._batches.current_epoch

    def gather(self, value: Any) -> Any:
        """Return ``value`` of all ranks, put together along its first dimension, on every rank that calls.

        In :meth:`evaluation_batches` only the ranks that have a batch call it; nothing is padded.

        Args:
            value: a tensor of any length, a number, or a nest of these. Tensors without a dimension and numbers become
                a 1-d tensor, and lists one list.
        """
        _, batches = self._ready()
        leaders = self._state.results.leaders
        if (evaluation := self._partial_round()) is not None:
            ranks = evaluation.ranks or []
            found = evaluation.gather(value)
            return concatenate([each for rank, each in zip(ranks, found, strict=True) if leaders[rank]])
        if not batches.in_evaluation:
            batches.end_evaluation()
        return gather_values(value, self._strategy, leaders)

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Return ``value`` combined over the ranks; see :meth:`.Strategy.reduce`.

        Args:
            value: a tensor, a number, or a nest of them.
            op: ``"mean"``, ``"sum"``, ``"min"``, ``"max"`` or ``"product"``.
        """
        self._all_ranks("reduce")
        return self._strategy.reduce(value, op)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return the value of rank ``src`` on every rank.

        Args:
            value: any picklable object.
            src: the rank that sends.
        """
        self._all_ranks("broadcast")
        return self._strategy.broadcast(value, src)

    def barrier(self, name: str = "") -> None:
        """Wait until all ranks have called it.

        Args:
            name: its name in the error after a timeout.
        """
        self._all_ranks("barrier")
        self._strategy.barrier(name)
