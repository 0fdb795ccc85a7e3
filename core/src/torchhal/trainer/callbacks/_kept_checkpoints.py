"""Rank the checkpoints of one ModelCheckpoint and list those that are kept and those that have a successor."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from torchhal.trainer.callbacks._monitor import check_score, is_better

# The names in the state of a checkpoint, by attribute. The first ones are restored in any folder, the others only in
# the folder they were saved for.
_STATE = {
    "best_model_path": "best_model_path",
    "best_model_score": "best_model_score",
    "current_score": "current_score",
    "seen_at": "_seen_at",
    "written_at": "_written_at",
}
_STATE_OF_FOLDER = {
    "best_k_models": "best_k_models",
    "last_model_path": "last_model_path",
    "newest": "_newest",
    "interrupted": "_interrupted",
    "superseded": "_doomed",
    "inherited": "_inherited",
}


@dataclass
class KeptCheckpoints:
    """The best, newest and last checkpoints of a run, and the own files to delete; the same on every rank.

    Attributes:
        best_model_path: the best so far, or without a monitor the newest; "" for none.
        best_model_score: its score; None without a monitor.
        current_score: the score of the latest look.
        seen_at: optimizer steps and batches of the latest look.
        written_at: optimizer steps and batches of the latest save.
        best_k_models: the score of each checkpoint that is kept for its score, by path.
        last_model_path: the ``last.ckpt``, or "".
        newest: what is kept without a monitor, or "".
        interrupted: the file written when a signal ended the run, deleted after the next save; or "".
        superseded: own files that have a successor, to be deleted once that is durable.
        inherited: path and score of the best of the run that this one resumes in another folder.
    """

    best_model_path: str = ""
    best_model_score: torch.Tensor | None = None
    current_score: torch.Tensor | None = None
    seen_at: tuple[int, int] | None = None
    written_at: tuple[int, int] | None = None
    best_k_models: dict[str, torch.Tensor] = field(default_factory=dict)
    last_model_path: str = ""
    newest: str = ""
    interrupted: str = ""
    superseded: list[str] = field(default_factory=list)
    inherited: tuple[str, torch.Tensor] | None = None

    @property
    def paths(self) -> set[str | None]:
        """The files of this run that are kept."""
        return {path for path in (*self.best_k_models, self.newest, self.last_model_path, self.interrupted) if path}

    # -- ranking -----------------------------------------------------------------------------------------------------

    def place(self, score: float, mode: str, top_k: int) -> tuple[bool, str | None]:
        """Return whether a checkpoint of ``score`` is among the best, and the path that it replaces or None.

        Args:
            score: the monitored value.
            mode: ``"min"`` or ``"max"``.
            top_k: how many are kept; -1 for all.
        """
        if top_k == -1 or len(self.best_k_models) < top_k:
            return True, None
        worst = self.worst(mode)
        return is_better(mode, score, float(self.best_k_models[worst])), worst

    def worst(self, mode: str) -> str:
        """Return the path of the worst of the checkpoints that are kept for their scores; "" for none."""
        worst = ""
        for path, score in self.best_k_models.items():
            if not worst or is_better(mode, float(self.best_k_models[worst]), float(score)):
                worst = path
        return worst

    def keep_newest(self, path: str, evicted: str | None, *, all_kept: bool) -> None:
        """Add ``path``, saved without a monitor, in place of ``evicted``.

        Args:
            path: the new checkpoint.
            evicted: the one it replaces, or None.
            all_kept: whether each checkpoint is kept, so that this one never gets a successor.
        """
        self._supersede(evicted, path)
        self.best_model_path = path
        self.newest = "" if all_kept else path

    def keep_scored(self, path: str, evicted: str | None, *, monitor: str, mode: str) -> None:
        """Add ``path``, whose score is :attr:`current_score`, in place of ``evicted``, and find the best anew."""
        self._supersede(evicted, path)
        assert self.current_score is not None
        self.best_k_models[path] = self.current_score
        if math.isnan(float(self.current_score)):
            warnings.warn(f"ModelCheckpoint: {monitor!r} is NaN, and a checkpoint of NaN is never the best")
        candidates = [*([self.inherited] if self.inherited else []), *self.best_k_models.items()]
        self.best_model_path, self.best_model_score = "", None
        best = float("nan")
        for candidate, score in candidates:
            if is_better(mode, float(score), best):
                best = float(score)
                self.best_model_path, self.best_model_score = candidate, score

    def _supersede(self, evicted: str | None, path: str) -> None:
        if evicted:
            self.best_k_models.pop(evicted, None)
            if evicted != path:
                self.superseded.append(evicted)

    def replace(self, attribute: Literal["last_model_path", "interrupted"], path: str) -> None:
        """Set the path in ``attribute``; the file that it named before is superseded."""
        old = getattr(self, attribute)
        if old and old != path:
            self.superseded.append(old)
        setattr(self, attribute, path)

    def take_superseded(self) -> list[str]:
        """Return the superseded files, without those that are kept again, and forget them."""
        kept = self.paths
        superseded, self.superseded = [path for path in self.superseded if path not in kept], []
        return superseded

    # -- state -------------------------------------------------------------------------------------------------------

    def copy(self) -> KeptCheckpoints:
        """Return a copy that shares no dict and no list with this one."""
        return KeptCheckpoints(**{each.name: copy.copy(getattr(self, each.name)) for each in fields(self)})

    def assign(self, other: KeptCheckpoints) -> None:
        """Become what ``other`` is, as after a save that failed."""
        vars(self).update(vars(other.copy()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, under the names it has in checkpoints."""
        names = {**_STATE, **_STATE_OF_FOLDER}
        return {saved: copy.copy(getattr(self, name)) for name, saved in names.items()}

    def resumed(self, state: Mapping[str, Any], *, same_folder: bool) -> KeptCheckpoints:
        """Return a copy with the values of ``state``.

        Args:
            state: a valid :meth:`state_dict`.
            same_folder: False for a run that continues in another folder: of the checkpoints in ``state`` it stores
                only the best, and deletes none.
        """
        kept = self.copy()
        for name, saved in {**_STATE, **(_STATE_OF_FOLDER if same_folder else {})}.items():
            setattr(kept, name, copy.copy(state[saved]))
        if not same_folder and kept.best_model_score is not None:
            kept.inherited = (kept.best_model_path, kept.best_model_score)
        return kept


def check_kept_state(state: Mapping[str, Any]) -> None:
    """Raise TypeError or KeyError, which names it, for a value of a state that no ModelCheckpoint has saved."""
    for name in ("dirpath", "best_model_path", "last_model_path", "_newest", "_interrupted"):
        if not isinstance(state[name], str) and not (name == "dirpath" and state[name] is None):
            raise TypeError(f"{name!r} must be a str (got {state[name]!r})")
    for name in ("best_model_score", "current_score"):
        if state[name] is not None:
            check_score(name, state[name])
    best = state["best_k_models"]
    if not isinstance(best, Mapping) or not all(isinstance(path, str) for path in best):
        raise TypeError(f"'best_k_models' must be a dict from paths to scores (got {best!r})")
    for score in best.values():
        check_score("best_k_models", score)
    if not isinstance(state["_doomed"], list) or not all(isinstance(path, str) for path in state["_doomed"]):
        raise TypeError(f"'_doomed' must be a list of paths (got {state['_doomed']!r})")
    for name, kinds in (("_seen_at", (int, int)), ("_written_at", (int, int)), ("_inherited", (str, object))):
        pair = state[name]
        pairs = isinstance(pair, tuple | list) and len(pair) == 2 and all(map(isinstance, pair, kinds))
        if pair is not None and not pairs:
            raise TypeError(f"{name!r} must be a pair or None (got {pair!r})")
    if state["_inherited"] is not None:
        check_score("_inherited", state["_inherited"][1])
