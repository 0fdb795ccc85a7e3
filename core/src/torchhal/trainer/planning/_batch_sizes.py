"""Grow a batch without its values, and give the training data of a run batches of another size."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchhal.errors import ModelError
from torchhal.pytree import map_tensors, moves_itself
from torchhal.trainer.data._batch_size_source import (
    DEFAULT_ATTRIBUTE,
    check_batch_size_source,
    loader_of_size,
    set_batch_size,
)
from torchhal.trainer.run_state import RunState

MOST_SAMPLES = 8192
"""In a batch of one rank; larger ones are asked for by the loader."""


def check_source(run: RunState) -> None:
    """Raise ConfigurationError where the size of the training loader's batches can't be changed."""
    check_batch_size_source(run.module, run.sources.train, run.datamodule, DEFAULT_ATTRIBUTE)


def give_batch_size(run: RunState, size: int) -> None:
    """Let the training loader of this call have batches of ``size`` samples."""
    if run.sources.train is not None:
        run.sources.train = loader_of_size(run.sources.train, size)
    else:
        set_batch_size(run.module, run.datamodule, DEFAULT_ATTRIBUTE, size)


def samples_of(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension that most of its tensors have.

    Raises:
        ModelError: no tensor has one.
    """
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not sizes:
        raise ModelError("batch_size='auto' needs batches with tensors, whose first dimension counts samples")
    return max(sizes, key=sizes.count)


def batch_of_size(batch: Any, size: int) -> Any:
    """Return ``batch`` with ``size`` samples, without values: on the meta device."""
    samples = samples_of(batch)

    def resized(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples:
            return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
        return leaf

    return map_tensors(batch, resized, is_leaf=moves_itself)
