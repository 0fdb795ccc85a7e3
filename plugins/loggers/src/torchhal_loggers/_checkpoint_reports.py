"""Decide which checkpoints a logger tells its service of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torchhal.trainer.callbacks import ModelCheckpoint


class CheckpointReport(NamedTuple):
    """A checkpoint, whether it is the best one so far, and its score, None where nothing is monitored."""

    path: str
    is_best: bool
    score: float | None


class CheckpointReports:
    """The checkpoints of a run, each reported once for each time that it is written.

    Args:
        which: True for the best one of each ModelCheckpoint when a call ends, ``"all"`` for each that is saved, False.
    """

    def __init__(self, which: bool | str) -> None:
        self._which = which
        self._best: dict[int, CheckpointReport] = {}  # by ModelCheckpoint
        self._reported: dict[str, float] = {}  # with their change times

    def after_save(self, callback: ModelCheckpoint) -> list[CheckpointReport]:
        """Return what to report now that ``callback`` has saved."""
        best = callback.best_model_path
        if self._which is True:
            self._best[id(callback)] = CheckpointReport(best, True, _number(callback.best_model_score))
            return []
        if self._which != "all":
            return []
        kept = {callback.last_model_path: callback.current_score, **callback.best_k_models}
        kept |= {best: callback.best_model_score}
        return self._new(CheckpointReport(path, path == best, _number(score)) for path, score in kept.items())

    def at_end(self) -> list[CheckpointReport]:
        """Return what to report when a call of the Trainer has ended."""
        best = list(self._best.values())
        self._best.clear()
        return self._new(best)

    def _new(self, reports: Iterable[CheckpointReport]) -> list[CheckpointReport]:
        new = []
        for report in reports:
            if report.path and self._reported.get(report.path) != (changed := _changed(report.path)):
                self._reported[report.path] = changed
                new.append(report)
        return new


def _number(score: Any) -> float | None:
    return None if score is None else float(score)


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
