"""Start, exhaust and close the iterators of loaders, and end their worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torchhal.distributed._dataloader_signals import WorkerInit, signals_blocked
from torchhal.trainer.data._compound import loaders_of


def start_iterator(loader: Any) -> Iterator[Any]:
    """``iter(loader)``, with workers that no signal to the whole group can end before they have set up its handling."""
    with ExitStack() as blocked:
        for each in loaders_of(loader):
            if isinstance(getattr(each, "worker_init_fn", None), WorkerInit):
                blocked.enter_context(signals_blocked(each))
        iterator: Iterator[Any] = iter(loader)
    return iterator


def until_any_ends(batches: Iterator[Any], strategy: Any) -> Iterator[Any]:
    """Yield the batches of a loader without a length until it ends on any rank. Every rank must call."""
    nothing = object()
    while strategy.reduce_boolean_decision((batch := next(batches, nothing)) is not nothing):
        yield batch


class AcceleratorIterator:
    """An iterator of a loader that the accelerator has put around another one.

    Args:
        iterator: gives the batches.
        ends: it may be asked for a batch more than there are, as a DataLoader's may.
    """

    def __init__(self, iterator: Iterator[Any], *, ends: bool) -> None:
        self._iterator = iterator
        self._ends = ends

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def exhaust(self) -> None:
        """Reach the end of the loader's sampler, if there is no batch left."""
        if self._ends:
            next(self._iterator, None)

    def close(self) -> None:
        """End what the iterator has started, if it offers that."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


def exhaust_sampler(iterator: Any) -> None:
    """Reach the end of the sampler of a DataLoader's iterator whose batches are used up, as a for loop does.

    A sampler with a generator of its own draws once more there. The iterator itself isn't advanced: a loader
    need not support more batches than its length.
    """
    if isinstance(iterator, AcceleratorIterator):
        iterator.exhaust()
        return
    next(getattr(iterator, "_sampler_iter", iter(())), None)


def close_loader(loader: Any) -> None:
    """End the persistent workers of a loader that was prepared for one run."""
    for each in loaders_of(loader):
        iterator = getattr(each, "_iterator", None)
        if isinstance(getattr(each, "worker_init_fn", None), WorkerInit) and iterator is not None:
            iterator._shutdown_workers()
            each.__dict__["_iterator"] = None


def close_iterator(iterator: Any) -> None:
    """End the workers of an iterator that may not have reached its end.

    The garbage collector would end them at any time, during another run or in a forked child.
    """
    if isinstance(iterator, AcceleratorIterator):
        iterator.close()
        return
    if getattr(iterator, "_persistent_workers", False):
        return
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
