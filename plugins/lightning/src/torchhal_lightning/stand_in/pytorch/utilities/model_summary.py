"""ModelSummary: a model's parts as a table."""

from __future__ import annotations

from typing import Any

from torchhal.trainer.callbacks import summarize as _table


class ModelSummary:
    """The submodules of a model and their parameter counts; ``str()`` of it is a table.

    Args:
        model: an nn.Module.
        max_depth: how deep it lists: 1 for the model's children, -1 for all.
    """

    def __init__(self, model: Any, max_depth: int = 1) -> None:
        self._model = model
        self._max_depth = max_depth

    @property
    def total_parameters(self) -> int:
        return sum(each.numel() for each in self._model.parameters())

    @property
    def trainable_parameters(self) -> int:
        return sum(each.numel() for each in self._model.parameters() if each.requires_grad)

    @property
    def model_size(self) -> float:
        """In megabytes."""
        return float(sum(each.numel() * each.dtype.itemsize for each in self._model.parameters()) / 1e6)

    def __str__(self) -> str:
        return _table(self._model, self._max_depth)

    __repr__ = __str__


def summarize(lightning_module: Any, max_depth: int = 1) -> ModelSummary:
    """Return the summary of a module."""
    return ModelSummary(lightning_module, max_depth)
