"""Choose the samples that a rank sees, and make loaders that read them."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.sampler import BatchSampler

from torchhal import rng
from torchhal.trainer.data._compound import loaders_of

_CHUNK = 1024  # items a rank keeps when it reads ahead in a shared draw


class EvaluationSampler(Sampler[int]):
    """A contiguous block of the dataset for each rank: every sample exactly once, in order over the ranks.

    No sample is repeated to balance the ranks, so some ranks may have one sample more than others.
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
    """Each rank's share of what another sampler draws.

    With ``pad`` every n-th item, and at the end the first ones again until every rank has as many; the draw is read
    a piece at a time, so it may be endless. Without, one block for each rank, which keeps the order over the ranks.

    All ranks must draw the same sequence, so the draw runs under one seed per epoch, of every generator on the host,
    and leaves the generators as they were.

    Args:
        sampler: draws the items of all ranks.
        num_replicas, rank: how many share them, and which of these this is.
        seed: see above.
        pad: see above.
        start: so many items are used already, and left out.
    """

    def __init__(
        self, sampler: Iterable[Any], num_replicas: int, rank: int, *, seed: int, pad: bool, start: int = 0
    ) -> None:
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.pad = pad
        self.start = start
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        forward = getattr(self.sampler, "set_epoch", None)
        if forward is not None:
            forward(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self.pad:
            return self._every_nth()
        items = [item for piece in self._draw() for item in piece]
        return iter([items[index] for index in self._block(len(items))])

    def __len__(self) -> int:
        total = max(0, len(self.sampler) - self.start)  # type: ignore[arg-type]
        return -(-total // self.num_replicas) if self.pad else len(self._block(total))

    def _block(self, total: int) -> range:
        return EvaluationSampler(total, self.num_replicas, self.rank).indices

    def _every_nth(self) -> Iterator[Any]:
        first: list[Any] = []
        for piece in self._draw():
            first = first or piece[: self.num_replicas]
            missing = -len(piece) % self.num_replicas  # only the last piece is no multiple
            padded = piece + list(itertools.islice(itertools.cycle(first), missing))
            yield from padded[self.rank :: self.num_replicas]

    def _draw(self) -> Iterator[list[Any]]:
        """All ranks' items, in pieces; between two pieces the generators have the caller's state."""
        iterator: Iterator[Any] | None = None
        own: Any = None
        while True:
            callers = self._generators()
            try:
                if iterator is None:
                    self._begin()
                    iterator = itertools.islice(iter(self.sampler), self.start, None)
                else:
                    self._restore(own)
                piece = list(itertools.islice(iterator, _CHUNK * self.num_replicas))
                own = self._generators()
            finally:
                self._restore(callers)
            if not piece:
                return
            yield piece

    def _begin(self) -> None:
        seed_host(self.seed + self.epoch)

    def _generators(self) -> Any:
        return rng.collect_host()

    def _restore(self, state: Any) -> None:
        rng.restore_host(state)


class RecordedOrderSampler:
    """The items that a loader draws in an epoch by itself, from its sampler or its batch sampler."""

    def __init__(self, loader: DataLoader[Any], *, draws_seed: bool) -> None:
        self.loader = loader
        self.draws_seed = draws_seed
        self.in_batches = type(loader.batch_sampler) is BatchSampler
        self.sampler: Any = _drawn_from(loader)

    def set_epoch(self, epoch: int) -> None:
        announce = getattr(self.sampler, "set_epoch", None)
        if announce is not None:
            announce(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # A loader's iterator draws a seed for its workers between making the sampler's and using it; one that is inside
        # a batch sampler is made at its first use.
        iterator = None if self.in_batches else iter(self.sampler)
        if self.draws_seed:
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        return iter(self.sampler) if iterator is None else iterator


class RemainingSampler(DistributedSamplerWrapper):
    """A rank's share of what is left of an epoch that a loader by itself began: the order is drawn as it was then.

    Args:
        order: what that loader drew.
        start: items of it that are used already.
        state: the host's generators, and those in ``generators``, from before that epoch's first item.
        generators: the loader's and its sampler's own.
        num_replicas, rank: see :class:`DistributedSamplerWrapper`.
    """

    def __init__(
        self,
        order: RecordedOrderSampler,
        num_replicas: int,
        rank: int,
        *,
        start: int,
        state: tuple[dict[str, Any], list[torch.Tensor]],
        generators: list[torch.Generator],
    ) -> None:
        super().__init__(order, num_replicas, rank, seed=0, pad=True, start=start)
        self.state = state
        self.generators = generators

    def _begin(self) -> None:
        self._restore(self.state)

    def _generators(self) -> Any:
        return rng.collect_host(), [generator.get_state() for generator in self.generators]

    def _restore(self, state: Any) -> None:
        host, states = state
        rng.restore_host(host)
        for generator, own in zip(self.generators, states, strict=False):
            generator.set_state(own)


def seed_host(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


class _Skipping:
    """A sampler that leaves out its first ``skip`` items, then calls ``then`` once, before the next one is used."""

    def __init__(self, inner: Any, skip: int, then: Callable[[], None]) -> None:
        self.inner = inner
        self.skip = skip
        self.then = then

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.inner)
        for _ in range(self.skip):
            if next(iterator, self) is self:  # fewer than there were
                break
        self.then()
        yield from iterator

    def __len__(self) -> int:
        return max(0, len(self.inner) - self.skip)


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a copy of ``loader`` that draws its samples from ``sampler``; a subclass stays one."""
    new = copy.copy(loader)
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None:
        if type(batch_sampler) is BatchSampler:
            batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)
        else:
            batch_sampler = copy.copy(batch_sampler)
            vars(batch_sampler)["sampler"] = sampler
    # DataLoader refuses these assignments after construction; in a copy that isn't iterated yet they are safe
    new.__dict__.update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
    return new


def with_batch_size(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a copy of ``loader``, which has a ``batch_size``, that makes batches of ``size`` samples."""
    new = copy.copy(loader)
    batch_sampler = BatchSampler(loader.sampler, size, loader.drop_last)
    new.__dict__.update(batch_size=size, batch_sampler=batch_sampler, _iterator=None)
    return new


def with_batch_sampler(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Return a copy of ``loader`` that takes its batches of indices from ``batch_sampler``."""
    new = copy.copy(loader)
    new.__dict__.update(batch_sampler=batch_sampler, _iterator=None)
    return new


def with_skip(loader: DataLoader[Any], skip: int, then: Callable[[], None]) -> DataLoader[Any]:
    """Return a copy of a map-style ``loader`` without its first ``skip`` batches, which are never read."""
    if loader.batch_sampler is not None:
        return with_batch_sampler(loader, _Skipping(loader.batch_sampler, skip, then))
    new = copy.copy(loader)
    new.__dict__.update(sampler=_Skipping(loader.sampler, skip, then), _iterator=None)
    return new


def distribute(
    loader: DataLoader[Any], *, num_replicas: int, rank: int, training: bool, seed: int, start: int = 0
) -> DataLoader[Any]:
    """Return a copy of a map-style ``loader`` that yields this rank's share.

    Training pads: the first samples are repeated until every rank has as many (torch's DistributedSampler).
    Evaluation doesn't: each sample is seen once. A batch sampler of the user's own yields all batches, of which each
    rank gets its share, as its use of an inner sampler is unknown.

    With ``start``, in training, the first items of the epoch's order, whichever ranks have used them, are left out.
    Items are samples, or batches of a batch sampler of the user's own.
    """
    if is_shared_by_user(loader):
        return loader
    sampler: Any = _drawn_from(loader)
    if sampler is loader.batch_sampler:
        batches: Any = sampler
        shares = DistributedSamplerWrapper(batches, num_replicas, rank, seed=seed, pad=training, start=start)
        return with_batch_sampler(loader, shares)
    plain = type(sampler) in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)
    if not training and type(sampler) is SequentialSampler:
        return with_sampler(loader, EvaluationSampler(len(loader.dataset), num_replicas, rank))  # type: ignore[arg-type]
    if training and plain and getattr(sampler, "_num_samples", None) is None:
        shuffle = isinstance(sampler, RandomSampler)
        if not start:
            new_sampler: Any = DistributedSampler(loader.dataset, num_replicas, rank, shuffle=shuffle, seed=seed)
            return with_sampler(loader, new_sampler)
        sampler = DistributedSampler(loader.dataset, 1, 0, shuffle=shuffle, seed=seed)
    shares = DistributedSamplerWrapper(sampler, num_replicas, rank, seed=seed, pad=training, start=start)
    return with_sampler(loader, shares)


def rest_of(loader: DataLoader[Any], sampler: RemainingSampler) -> DataLoader[Any]:
    """Return a copy of a map-style ``loader`` that takes its samples, or batches, from ``sampler``."""
    return (with_batch_sampler if _drawn_from(loader) is loader.batch_sampler else with_sampler)(loader, sampler)


def _drawn_from(loader: DataLoader[Any]) -> Any:
    """Return what a loader's order comes from: its sampler, or a batch sampler of the user's own."""
    batch_sampler: Any = loader.batch_sampler
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler
    # a loader that was given a batch sampler has a sampler too, of torch's making, that is never drawn from
    return loader.sampler if batch_sampler is None else batch_sampler


def is_shared_by_user(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's sampler is distributed already."""
    batch_sampler = loader.batch_sampler
    return any(map(_is_distributed, (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))))


def _is_distributed(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler | DistributedSamplerWrapper | EvaluationSampler) or (
        hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")
    )


def sequential(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of ``loader`` that doesn't shuffle, for ``overfit_batches``."""
    batch_sampler = loader.batch_sampler
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else loader.sampler
    if isinstance(sampler, RandomSampler):
        return with_sampler(loader, SequentialSampler(loader.dataset))  # type: ignore[arg-type]
    return loader


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of every sampler of ``loader``, and of those inside of it, that has it."""
    for each in loaders_of(loader):
        for candidate in (getattr(each, "sampler", None), getattr(each, "batch_sampler", None)):
            inner = getattr(candidate, "sampler", None)
            for sampler in (candidate, inner):
                announce = getattr(sampler, "set_epoch", None)
                if announce is not None:
                    announce(epoch)
