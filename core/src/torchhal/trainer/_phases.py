"""Call a strategy's hooks at the start and the end of each phase of a run, in pairs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torchhal.distributed.signals import is_agreed
from torchhal.strategies import Strategy
from torchhal.strategies._hooks import epoch_start_of
from torchhal.trainer._run_part import RunPart

_log = logging.getLogger("torchhal")


class PhaseContext(Protocol):
    """The attribute of a :class:`~torchhal.trainer.run_state.RunState` on which its phases depend."""

    @property
    def strategy(self) -> Strategy: ...


class Phases(RunPart[PhaseContext]):
    """The phases of a run that have started for its strategy and not ended: training, an epoch, an evaluation.

    Each hook of a phase is called through here, so that an end is never called without its start, nor twice.
    """

    def __init__(self, run: PhaseContext) -> None:
        super().__init__(run)
        self._open: list[Callable[[], None]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_open": []}  # a copy belongs to no run

    def __len__(self) -> int:
        return len(self._open)

    def start_train(self) -> None:
        """Call ``on_train_start``."""
        strategy = self.run.strategy
        strategy.on_train_start()
        self._open.append(strategy.on_train_end)

    def start_epoch(self) -> None:
        """Call ``on_train_epoch_start``, or the ``begin_epoch`` of a strategy that overrides it."""
        strategy = self.run.strategy
        epoch_start_of(strategy)()
        self._open.append(strategy.on_train_epoch_end)

    def start_evaluation(self, stage: str) -> None:
        """Call ``on_evaluation_start(stage)``."""
        strategy = self.run.strategy
        strategy.on_evaluation_start(stage)
        self._open.append(partial(strategy.on_evaluation_end, stage))

    def end(self) -> None:
        """Call the end hook of the innermost phase."""
        self._open.pop()()

    def end_all(self, *, down_to: int = 0) -> None:
        """Call the end hooks of all phases but the ``down_to`` outermost, the innermost first."""
        while len(self._open) > down_to:
            self.end()

    def fail(self, error: BaseException) -> None:
        """Call ``on_exception``, then the end hooks that are left; what one of them raises is logged.

        Args:
            error: what ends the run.
        """
        strategy = self.run.strategy
        if not is_agreed(error):
            strategy.failure = error
        calls: list[Callable[[], None]] = [partial(strategy.on_exception, error), *reversed(self._open)]
        self._open.clear()
        for call in calls:
            try:
                call()
            except Exception:  # the first error is raised
                _log.exception("a hook of %s failed too", type(strategy).__name__)
