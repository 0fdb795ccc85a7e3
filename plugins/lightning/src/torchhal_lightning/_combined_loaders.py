"""Several loaders at once, as Lightning's CombinedLoader reads them: its modes, and any structure of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.data import DataLoader

from torchhal.errors import ConfigurationError
from torchhal.trainer.adapters import CompoundLoader, is_loader
from torchhal_lightning import _trees as trees

MODES = {"max_size_cycle": max, "max_size": max, "min_size": min}
"""How many batches an epoch has, of the numbers of its loaders."""


class CombinedBatches(CompoundLoader):
    """Batches that have the structure of the loaders that they come from.

    Args:
        structure: loaders in lists, tuples and dicts, at any depth.
        mode: how long an epoch lasts. "min_size": as the shortest of them; "max_size": as the longest, with None for
            those that have ended; "max_size_cycle": the same, and the others begin again.
    """

    def __init__(self, structure: Any, mode: str) -> None:
        self.structure = structure
        self.mode = mode
        self._loaders, self._spec = _pytree.tree_flatten(structure, is_leaf=_holds_samples)

    @property
    def loaders(self) -> list[Any]:
        return list(self._loaders)

    def with_loaders(self, loaders: list[Any]) -> CombinedBatches:
        return CombinedBatches(_pytree.tree_unflatten(loaders, self._spec), self.mode)

    def __iter__(self) -> Iterator[Any]:
        return _Iterator(self._loaders, self.mode, self._spec)

    def __len__(self) -> int:
        """Return the batches of an epoch; raise TypeError where one of the loaders has no length."""
        return int(MODES[self.mode](map(len, self._loaders)))


class Samples:
    """A container of plain values as a loader, whose batches they are."""

    def __init__(self, values: Any) -> None:
        self._values = list(values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Iterator(Iterator[Any]):
    """One epoch.

    Args:
        loaders: all of them.
        mode: as of CombinedBatches.
        spec: of the structure.
    """

    def __init__(self, loaders: list[Any], mode: str, spec: _pytree.TreeSpec) -> None:
        self._loaders, self._mode, self._spec = loaders, mode, spec
        self._iterators = [iter(loader) for loader in loaders]
        self._ended = [False] * len(loaders)

    def __next__(self) -> Any:
        return _pytree.tree_unflatten([self._next_of(index) for index in range(len(self._loaders))], self._spec)

    def _next_of(self, index: int) -> Any:
        """Return the next batch of a loader; raise StopIteration where it ends the epoch."""
        try:
            return next(self._iterators[index])
        except StopIteration:
            self._ended[index] = True
            if self._mode == "min_size" or all(self._ended):
                raise
        if self._mode == "max_size":
            return None
        self._iterators[index] = iter(self._loaders[index])
        return next(self._iterators[index])

    def _shutdown_workers(self) -> None:
        self._iterators = []


def combined(stage: str, loaders: Any) -> Any:
    """Return what feeds ``stage`` for loaders in the forms that Lightning takes.

    Args:
        stage: train, validate, test or predict.
        loaders: one, a structure of several, or a CombinedLoader.

    Raises:
        ConfigurationError: a CombinedLoader of a mode that isn't for this stage.
    """
    if isinstance(loaders, trees.classes("utilities.CombinedLoader")):
        return _of_combined_loader(stage, loaders)
    if stage != "train":
        is_list = isinstance(loaders, list | tuple)
        if isinstance(loaders, Mapping) or (is_list and any(map(_holds_samples, loaders))):
            leaves = _pytree.tree_leaves(loaders, is_leaf=_holds_samples)
            return [Samples(each) if _holds_samples(each) else each for each in leaves]
        return loaders
    if isinstance(loaders, Mapping) or (isinstance(loaders, list | tuple) and loaders and all(map(_reads, loaders))):
        return CombinedBatches(loaders, "max_size_cycle")
    return loaders


def begin_once(loaders: Any) -> None:
    """Make an iterator of each loader that is no DataLoader, as Lightning does before the first epoch.

    It asks whether one can; a loader that shuffles itself draws then, and its epochs have other orders without it.
    """
    for loader in _each(loaders):
        if not isinstance(loader, DataLoader):
            iter(loader)


def draw_as_iterators(loaders: Any) -> None:
    """Draw the random numbers that an iterator of each loader draws as it is made; a DataLoader starts no workers."""
    for loader in _each(loaders):
        if not isinstance(loader, DataLoader):
            iter(loader)
            continue
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the workers' seed
        if loader.num_workers and loader.batch_sampler is not None:  # which get their first batches at once
            deque(islice(loader.batch_sampler, loader.num_workers * (loader.prefetch_factor or 2)), maxlen=0)


def _each(loaders: Any) -> Iterator[Any]:
    is_compound = isinstance(loaders, CompoundLoader)
    found = loaders.loaders if is_compound else _pytree.tree_leaves(loaders, is_leaf=_holds_samples)
    return filter(is_loader, found)


def _holds_samples(value: Any) -> bool:
    """Whether ``value`` is a container of plain values, which Lightning reads as a loader of them."""
    plain = (str, bytes, int, float, complex, bool, type(None))
    return isinstance(value, list | tuple | set) and bool(value) and all(isinstance(each, plain) for each in value)


def _reads(value: Any) -> bool:
    """Whether ``value`` is a loader or holds some, rather than a batch."""
    if isinstance(value, Mapping):
        return all(map(_reads, value.values()))
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_reads, value))
    return is_loader(value)


def _of_combined_loader(stage: str, loader: Any) -> Any:
    mode = loader._mode
    if mode != "sequential":
        return CombinedBatches(loader.iterables, mode)
    if stage == "train":
        raise ConfigurationError(
            f"'train_dataloaders' can't be a CombinedLoader of mode 'sequential': a fit takes {', '.join(MODES)}"
        )
    return list(loader.flattened)
