"""Let rank 0 decide for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torchhal.errors import ConfigurationError

if TYPE_CHECKING:
    from torchhal import Trainer

T = TypeVar("T")


def decide_on_rank_zero(trainer: Trainer, decide: Callable[[], T]) -> T:
    """Return what ``decide`` returns on rank 0, the only rank where it is called. Every rank must call.

    Raises:
        ConfigurationError: on the other ranks, if ``decide`` raises; rank 0 raises the error itself.
    """
    strategy = trainer.strategy
    if strategy.world_size == 1:
        return decide()
    error: Exception | None = None
    decision: T | None = None
    if trainer.is_global_zero:
        try:
            decision = decide()
        except Exception as raised:
            error = raised
    result: T
    result, failure = strategy.broadcast((decision, None if error is None else str(error)))
    if error is not None:
        raise error
    if failure is not None:
        raise ConfigurationError(failure)
    return result
