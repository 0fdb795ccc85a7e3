"""Which samples a rank sees, and how a loader is told so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.sampler import BatchSampler


class EvaluationSampler(Sampler[int]):
    """A contiguous block of the dataset for each rank: every sample exactly once, in order over the ranks.

    No sample is repeated to even the ranks out, so some ranks may have one sample more than others.
    """

    def __init__(self, length: int, num_replicas: int, rank: int) -> None:
        share, rest = divmod(length, num_replicas)
        start = rank * share + min(rank, rest)
        self.indices = range(start, start + share + (rank < rest))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class DistributedSamplerWrapper(Sampler[Any]):
    """Each rank's share of what another sampler draws: every n-th item, padded from the front when ``pad``.

    All ranks must draw the same sequence, so the draw runs under one seed per epoch and leaves the generators
    as they were.
    """

    def __init__(self, sampler: Iterable[Any], num_replicas: int, rank: int, *, seed: int, pad: bool) -> None:
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.pad = pad
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        forward = getattr(self.sampler, "set_epoch", None)
        if forward is not None:
            forward(epoch)

    def __iter__(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + self.epoch)
            items = list(self.sampler)
        if self.pad and items:
            missing = -len(items) % self.num_replicas
            items += (items * (missing // len(items) + 1))[:missing]
        return iter(items[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        total = len(self.sampler)  # type: ignore[arg-type]
        if self.pad:
            return math.ceil(total / self.num_replicas)
        return len(range(self.rank, total, self.num_replicas))


class _Skipping:
    """A sampler that leaves out its first ``skip`` items, then calls ``then`` once, before the next one is used."""

    def __init__(self, inner: Any, skip: int, then: Callable[[], None]) -> None:
        self.inner = inner
        self.skip = skip
        self.then = then

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.inner)
        for _ in range(self.skip):
            next(iterator, None)
        self.then()
        yield from iterator

    def __len__(self) -> int:
        return max(0, len(self.inner) - self.skip)


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """A copy of ``loader`` that draws its samples from ``sampler``; a subclass stays one."""
    new = copy.copy(loader)
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None:
        if type(batch_sampler) is BatchSampler:
            batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)
        else:
            batch_sampler = copy.copy(batch_sampler)
            vars(batch_sampler)["sampler"] = sampler
    # DataLoader refuses these assignments after construction; in a copy that nobody iterates yet they are safe
    new.__dict__.update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
    return new


def with_batch_sampler(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """A copy of ``loader`` that takes its batches of indices from ``batch_sampler``."""
    new = copy.copy(loader)
    new.__dict__.update(batch_sampler=batch_sampler, _iterator=None)
    return new


def with_skip(loader: DataLoader[Any], skip: int, then: Callable[[], None]) -> DataLoader[Any]:
    """A copy of a map-style ``loader`` without its first ``skip`` batches, which are never read."""
    if loader.batch_sampler is not None:
        return with_batch_sampler(loader, _Skipping(loader.batch_sampler, skip, then))
    new = copy.copy(loader)
    new.__dict__.update(sampler=_Skipping(loader.sampler, skip, then), _iterator=None)
    return new


def distribute(loader: DataLoader[Any], *, num_replicas: int, rank: int, training: bool, seed: int) -> DataLoader[Any]:
    """A copy of a map-style ``loader`` that yields this rank's share.

    Training pads: the first samples are repeated until every rank has as many (torch's DistributedSampler).
    Evaluation doesn't: each sample is seen once.
    """
    if isinstance(loader.sampler, DistributedSampler | DistributedSamplerWrapper | EvaluationSampler):
        return loader  # the user has done it
    sampler: Any = loader.sampler
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler and not hasattr(batch_sampler, "sampler"):
        shares = DistributedSamplerWrapper(batch_sampler, num_replicas, rank, seed=seed, pad=training)
        return with_batch_sampler(loader, shares)
    plain = type(sampler) in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)
    if not training and isinstance(sampler, SequentialSampler):
        return with_sampler(loader, EvaluationSampler(len(loader.dataset), num_replicas, rank))  # type: ignore[arg-type]
    if training and plain and getattr(sampler, "_num_samples", None) is None:
        shuffle = isinstance(sampler, RandomSampler)
        new_sampler: Any = DistributedSampler(loader.dataset, num_replicas, rank, shuffle=shuffle, seed=seed)
        return with_sampler(loader, new_sampler)
    return with_sampler(loader, DistributedSamplerWrapper(sampler, num_replicas, rank, seed=seed, pad=training))


def sequential(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of ``loader`` that doesn't shuffle, for ``overfit_batches``."""
    if isinstance(loader.sampler, RandomSampler):
        return with_sampler(loader, SequentialSampler(loader.dataset))  # type: ignore[arg-type]
    return loader


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell every sampler of ``loader`` that wants to know which epoch this is."""
    for candidate in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        inner = getattr(candidate, "sampler", None)
        for sampler in (candidate, inner):
            announce = getattr(sampler, "set_epoch", None)
            if announce is not None:
                announce(epoch)
