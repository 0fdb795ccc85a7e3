"""Write predictions while they are made, each rank its own, with PredictionWriter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchhal._overrides import overrides
from torchhal.errors import ConfigurationError
from torchhal.pytree import move_to_device
from torchhal.suggestions import one_of
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer

INTERVALS = {
    "batch": ("write_on_batch_end",),
    "epoch": ("write_on_epoch_end",),
    "batch_and_epoch": ("write_on_batch_end", "write_on_epoch_end"),
}
"""When to write -> the methods that a subclass defines."""


class PredictionWriter(Callback):
    """Base class of callbacks that write predictions: define one of the two methods, or both.

    Every rank writes what it has predicted, into files of its own; of ranks that share the batches of one model, the
    first one does. With ``predict(return_predictions=False)`` nothing else keeps the predictions.

    Args:
        write_interval: ``"batch"``, ``"epoch"`` or ``"batch_and_epoch"``. For ``"epoch"`` this rank's predictions are
            kept on the CPU until the end.

    Raises:
        ValueError: another interval.
        ConfigurationError: in ``setup``, a method of the interval isn't defined.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in INTERVALS:
            raise ValueError(f"'write_interval' must be {one_of(INTERVALS)} (got {write_interval!r})")
        self._methods = INTERVALS[write_interval]
        self._predictions: list[list[Any]] = []
        self._indices: list[list[list[int] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: Any,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the prediction of one batch of this rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            prediction: what ``predict_step`` returned.
            batch_indices: the batch's samples, as indices of the dataset; None for a loader that has none, such as one
                of an ``IterableDataset``.
            batch: the batch, on its device.
            batch_idx: the number of the batch on this rank, from 0.
            dataloader_idx: the number of the dataloader, from 0.
        """
        raise NotImplementedError

    def write_on_epoch_end(
        self, trainer: Trainer, module: Any, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all predictions of this rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            predictions: what ``predict_step`` returned, on the CPU: a list by batches; with several dataloaders a list
                of these.
            batch_indices: a list for each dataloader, of the ``batch_indices`` of each of its batches.
        """
        raise NotImplementedError

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        for name in self._methods:
            if not overrides(self, PredictionWriter, name):
                raise ConfigurationError(
                    f"{type(self).__name__} must define {name}, which its write_interval calls; define it, or give "
                    "another interval to super().__init__"
                )
        trainer.evaluation_loop.records_batch_indices = stage == "predict"

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        trainer.evaluation_loop.records_batch_indices = False
        self._predictions, self._indices = [], []

    def on_predict_epoch_start(self, trainer: Trainer, module: Any) -> None:
        loaders = range(len(trainer.num_predict_batches))
        self._predictions, self._indices = [[] for _ in loaders], [[] for _ in loaders]

    def on_predict_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.strategy.is_data_leader:
            return
        indices = trainer.evaluation_loop.batch_indices
        if "write_on_batch_end" in self._methods:
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if "write_on_epoch_end" in self._methods:
            self._predictions[dataloader_idx].append(move_to_device(outputs, torch.device("cpu")))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if "write_on_epoch_end" in self._methods and trainer.strategy.is_data_leader:
            several = len(self._predictions) > 1
            predictions = self._predictions if several else [each for kept in self._predictions for each in kept]
            self.write_on_epoch_end(trainer, module, predictions, self._indices)
