"""Predictions, and the indices of their samples, as Lightning's prediction writers read them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler

from torchhal.pytree import move_to_device
from torchhal.trainer.adapters import RunState
from torchhal_lightning._loop_views import EvaluationLoopView

_IN_ORDER = ("SequentialSampler", "EvaluationSampler")
"""Samplers that draw the same each time: torch's, and torchhal's for several ranks."""


class PredictLoopView(EvaluationLoopView):
    """``trainer.predict_loop``.

    The indices of a batch come from the loader's batch sampler, where that goes through the samples in order; of any
    other they are not known, and empty, as under Lightning those of a loader without a batch sampler.

    Args:
        run: that predicts.
    """

    def __init__(self, run: RunState) -> None:
        super().__init__(run, "predict")
        self.returned: list[Any] | None = None
        """What the last call returned."""
        self._indices: dict[int, list[list[int]] | None] = {}
        self._outputs: dict[tuple[int, int], Any] = {}
        self._current: tuple[int, int] = (0, 0)

    def note(self, output: Any, batch_idx: int, dataloader_idx: int, *, keep: bool) -> None:
        """Take note of a batch that was predicted.

        Args:
            output: what ``predict_step`` returned.
            batch_idx: number of the batch.
            dataloader_idx: number of the loader.
            keep: until the end of the epoch, for a writer that wants all.
        """
        self._current = (dataloader_idx, batch_idx)
        if keep or self._current not in self._outputs:
            self._outputs[self._current] = move_to_device(output, torch.device("cpu")) if keep else None

    def _indices_of(self, dataloader_idx: int) -> list[list[int]] | None:
        if dataloader_idx not in self._indices:
            loader = self._run.sources.evaluation_data.loaders[dataloader_idx]
            batches: Any = getattr(loader, "batch_sampler", None)
            in_order = type(batches) is BatchSampler and type(batches.sampler).__name__ in _IN_ORDER
            self._indices[dataloader_idx] = [list(each) for each in batches] if in_order else None
        return self._indices[dataloader_idx]

    @property
    def current_batch_indices(self) -> list[int]:
        loader, batch = self._current
        indices = self._indices_of(loader)
        return [] if indices is None else indices[batch]

    @property
    def epoch_batch_indices(self) -> list[list[list[int]]]:
        found: list[list[list[int]]] = [[] for _ in self._run.sources.evaluation_data.loaders]
        for loader, batch in sorted(self._outputs):
            indices = self._indices_of(loader)
            found[loader].append([] if indices is None else indices[batch])
        return found

    @property
    def predictions(self) -> list[Any]:
        """Those of each batch; a list for each loader where there are several."""
        if self.returned is not None:
            return self.returned
        found: list[list[Any]] = [[] for _ in self._run.sources.evaluation_data.loaders]
        for loader, batch in sorted(self._outputs):
            found[loader].append(self._outputs[loader, batch])
        return found[0] if len(found) == 1 else found
