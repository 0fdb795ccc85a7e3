"""Declare the attributes of a run that its loaders depend on."""

from __future__ import annotations

from typing import Protocol

from torchhal.strategies import Strategy
from torchhal.trainer._state import TrainerState


class DataContext(Protocol):
    """The attributes of a :class:`~torchhal.trainer.run_state.RunState` on which its data depend."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def state(self) -> TrainerState: ...
    @property
    def world_size(self) -> int: ...
    @property
    def use_distributed_sampler(self) -> bool: ...
    @property
    def by_hand(self) -> bool: ...
    @property
    def overfit_batches(self) -> int | float: ...
    @property
    def limit_train_batches(self) -> int | float: ...
    def warn_once(self, message: str) -> None: ...
