"""Read a batch of a loader as an example, without workers, and leave the loader where it is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from torchhal.errors import ModelError
from torchhal.trainer.data._loaders import is_one_shot


def first_batch(loader: Any) -> Any:
    """Return a batch as ``loader`` gives them; of a DataLoader, one of the first samples of its dataset.

    Raises:
        ModelError: it has none, or reading one would take it away from the training.
        Exception: what the dataset or the loader raises.
    """
    if isinstance(loader, DataLoader):
        return _batch_of_dataset(loader)
    if is_one_shot(loader):
        raise ModelError(f"a {type(loader).__name__} gives its batches only once")
    if isinstance(loader, Sequence):
        if not loader:
            raise ModelError("the loader is empty")
        return loader[0]
    for batch in loader:
        return batch
    raise ModelError("the loader gave no batch")


def _batch_of_dataset(loader: DataLoader[Any]) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        alone = copy.copy(loader)
        alone.__dict__.update(
            dataset=copy.deepcopy(loader.dataset), num_workers=0, prefetch_factor=None, persistent_workers=False,
            timeout=0, _iterator=None,
        )  # fmt: skip
        for batch in alone:
            return batch
        raise ModelError("the loader gave no batch")
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    if type(loader.batch_sampler) is BatchSampler:
        indices = list(range(min(loader.batch_sampler.batch_size, len(dataset))))
    else:  # its state is the order of the training
        indices = list(next(iter(copy.deepcopy(loader.batch_sampler)), []))
    if not indices:
        raise ModelError("the loader gave no batch")
    fetch = getattr(dataset, "__getitems__", None)
    samples = [dataset[index] for index in indices] if fetch is None else fetch(indices)
    return loader.collate_fn(samples)
