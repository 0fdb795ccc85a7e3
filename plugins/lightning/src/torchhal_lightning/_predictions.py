"""Predictions, and the indices of their samples, as Lightning's prediction writers read them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import RandomSampler

from torchhal.trainer.adapters import Run


class PredictLoopView:
    """``trainer.predict_loop``.

    The indices of a batch come from the loader's batch sampler, drawn a second time; those of a sampler that shuffles
    are not known, as under Lightning those of a loader without a batch sampler.

    Args:
        run: that predicts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
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
            self._outputs[self._current] = output if keep else None

    def _indices_of(self, dataloader_idx: int) -> list[list[int]] | None:
        if dataloader_idx not in self._indices:
            loader = self._run.sources.evaluation_data.loaders[dataloader_idx]
            sampler = getattr(loader, "batch_sampler", None)
            shuffled = isinstance(getattr(sampler, "sampler", None), RandomSampler)
            self._indices[dataloader_idx] = None if sampler is None or shuffled else [list(each) for each in sampler]
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
        found: list[list[Any]] = [[] for _ in self._run.sources.evaluation_data.loaders]
        for loader, batch in sorted(self._outputs):
            found[loader].append(self._outputs[loader, batch])
        return found[0] if len(found) == 1 else found
