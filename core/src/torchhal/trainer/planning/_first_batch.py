"""Read a batch of a loader as an example, without workers, and leave the loader where it is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

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
    dataset: Any = _copied(loader.dataset)
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


def _copied(dataset: Any) -> Any:
    """Return a copy of a dataset, and of those inside of it, that shares its data.

    What it opens at its first access, such as a file, it opens for itself: a worker process can't be sent that.
    """
    made = copy.copy(dataset)
    own = getattr(made, "__dict__", {})
    if "dataset" in own:
        own["dataset"] = _copied(own["dataset"])
    if isinstance(own.get("datasets"), list):
        own["datasets"] = [_copied(each) for each in own["datasets"]]
    return made


def is_repeatable(loader: Any) -> bool:
    """Return whether batches that a trial takes are there again in the fit."""
    return not is_one_shot(loader) and not isinstance(getattr(loader, "dataset", None), IterableDataset)


def is_divided(loader: Any) -> bool:
    """Return whether the ranks' shares of ``loader`` are made here, of one order of samples for all."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) in (RandomSampler, SequentialSampler)
    )
