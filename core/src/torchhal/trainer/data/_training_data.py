"""Read the training loader epoch by epoch, and keep the exact position in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from torchhal import rng
from torchhal.errors import ModelError
from torchhal.trainer._run_part import RunPart
from torchhal.trainer.data import _samplers as samplers
from torchhal.trainer.data._accelerator_loader import (
    accelerator_loader,
    close_accelerator_loader,
    is_stateful,
    start_accelerator_iterator,
)
from torchhal.trainer.data._compound import loaders_of
from torchhal.trainer.data._context import DataContext
from torchhal.trainer.data._iterators import close_loader
from torchhal.trainer.data._loaders import check_one_loader, limit_length, loader_length, no_batch
from torchhal.trainer.data._sharing import prepare_loader, prepare_rest, replicas, sampler_seed


class TrainingData(RunPart[DataContext]):
    """The training loader, one iterator per epoch, and the position in it.

    The position is exact: it holds the generators' states from before the epoch's iterator was made, the number
    of batches used, and (in the checkpoint's ``rng``) the states at that point. Continuing makes the same
    iterator and goes to the next batch: without workers by skipping indices, with workers (whose own generators
    have advanced with every sample) by reading the batches again, and for a loader with ``state_dict`` and
    ``load_state_dict`` through these.

    A run may continue with another number of replicas during an epoch. ``order`` describes how the epoch's items
    were drawn, for all replicas, so that the remaining ones can be shared out anew. Items are samples, or
    batches where the user's own batch sampler, or no sampler at all, makes these.
    """

    def __init__(self, loader: Any, run: DataContext) -> None:
        check_one_loader(loader)
        super().__init__(run)
        self.given = loader
        self.loader = self._whole = prepare_loader(loader, run, training=True)
        self.iterated = self._whole_iterated = accelerator_loader(self.loader, run)
        """What the accelerator made of ``loader``, which gives the same batches; positions are the loader's."""
        self._of_epoch: list[tuple[Any, Any]] = []
        """Loaders of the running epoch alone, the rest of one, and what the accelerator made of each."""
        self._is_closed = False
        self.loader_length = loader_length(self.loader)
        if self.loader_length == 0 and self._limit()[0]:
            raise no_batch("the training loader", loader)
        self.length = limit_length(self.loader_length, *self._limit())
        """Batches of the epoch; of a whole one, ``whole_length``."""
        self.whole_length, self.whole_loader_length = self.length, self.loader_length
        self.order = self._whole_order = self._own_order()
        self.epoch_rng: dict[str, Any] | None = None
        self.generator_states: list[Any] = []
        self.is_new = True
        """Whether no epoch has read from it yet."""
        self._check_ranks_agree()

    def _check_ranks_agree(self) -> None:
        strategy = self.run.strategy
        if strategy.world_size == 1:
            return
        lengths = strategy.all_gather_object(self.length)
        if len(set(lengths)) > 1:
            listing = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
            counts = [length for length in lengths if length is not None]
            hint = f"use limit_train_batches={min(counts)}"
            if len(counts) < len(lengths):
                hint = "use the same kind of loader"
            elif self.run.by_hand:
                hint = f"leave out those after {min(counts)}"
            raise ModelError(
                f"every rank must train on the same number of batches ({listing}): {hint}, or let the "
                f"{'Run' if self.run.by_hand else 'Trainer'} share one dataset out (use_distributed_sampler=True)"
            )

    def _limit(self) -> tuple[int | float, str]:
        run = self.run
        if run.overfit_batches:
            return run.overfit_batches, "overfit_batches"
        return run.limit_train_batches, "limit_train_batches"

    def _own_order(self) -> dict[str, Any] | None:
        """Return how a whole epoch is drawn: with ``seed``, or (None) from the loader's generators; None if unknown."""
        given = self.given
        if (
            not isinstance(given, DataLoader)
            or type(self.loader) is not type(given)  # a strategy's own, whose batches may hold any number of items
            or isinstance(given.dataset, IterableDataset)
            or samplers.is_shared_by_user(given)
            or not self.run.use_distributed_sampler
        ):
            return None
        if replicas(self.run) is not None:
            seed: int | None = sampler_seed()
        elif (
            self.run.world_size == 1
            and not hasattr(given, "load_state_dict")
            and not samplers.is_shared_by_user(self.loader)  # a strategy may have shared it out among other runs
        ):
            seed = None
        else:
            return None
        return {"seed": seed, "start": 0, "batches": 0, "per_batch": self.items_per_batch, "draws_seed": True}

    @property
    def items_per_batch(self) -> int:
        """Items of :attr:`order` in a batch of one replica."""
        owner = self.given
        if isinstance(owner, DataLoader):
            owner = owner.batch_sampler if type(owner.batch_sampler) is BatchSampler else None
        size = getattr(owner, "batch_size", None)
        return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1

    def restore_order(self, entry: dict[str, Any]) -> None:
        """Continue the running epoch in the order that it had in the run that saved ``entry``, a :meth:`position`."""
        order = entry.get("order")
        if order is None or self.order is None:
            return
        # the loader by itself would draw another one where a rest is left, or its workers had their seed already
        if order["start"] or order != self.order:
            self.resume_remaining(self.remaining_after(entry, order["start"]))

    def resume_remaining(self, order: dict[str, Any]) -> None:
        """Let the running epoch have the items of ``order`` from number ``order["start"]`` on.

        That is where this number of replicas took over, at batch ``order["batches"]``.
        """
        self.order = order
        self.loader = prepare_rest(self.given, self.run, order, self._generators())
        self.iterated = accelerator_loader(self.loader, self.run)
        self._of_epoch.append((self.loader, self.iterated))
        rest = loader_length(self.loader)
        self.loader_length = None if rest is None else order["batches"] + rest
        self.length = limit_length(self.loader_length, *self._limit())

    def reset_epoch(self) -> None:
        """Let the next epoch have all items again."""
        self._close_epoch()
        self.loader, self.order = self._whole, self._whole_order
        self.iterated = self._whole_iterated
        self.length, self.loader_length = self.whole_length, self.whole_loader_length

    def close(self) -> None:
        """End, once, what the loaders keep between epochs: worker processes, and what the accelerator added."""
        self._close_epoch()
        if not self._is_closed:
            self._is_closed = True
            close_accelerator_loader(self._whole, self._whole_iterated)
            close_loader(self._whole)

    def _close_epoch(self) -> None:
        while self._of_epoch:
            loader, made = self._of_epoch.pop()
            close_accelerator_loader(loader, made)
            close_loader(loader)

    def remaining_after(self, entry: dict[str, Any], used: int) -> dict[str, Any]:
        """Return the order of an epoch after its first ``used`` items, from a rank's former :meth:`position`."""
        order = {**entry["order"], "start": used, "per_batch": self.items_per_batch}
        if order["seed"] is None and "rng" not in order:
            host = {name: state for name, state in entry["epoch_rng"].items() if not name.startswith("device")}
            order.update(rng=host, generators=entry["generators_at_start"])
        return order

    @property
    def samples(self) -> int | None:
        """Of an epoch over all ranks; None if the dataset has no length."""
        dataset = getattr(self.given, "dataset", None)
        return None if isinstance(dataset, IterableDataset) else loader_length(dataset)

    def _generators(self) -> list[Any]:
        """Return the loader's own generators, each once, and the one that a strategy may have given it."""
        found: list[Any] = []
        owners: list[Any] = []
        for given in loaders_of(self.given):
            batches = getattr(given, "batch_sampler", None)
            owners += [given, getattr(given, "sampler", None), batches, getattr(batches, "sampler", None)]
        for owner in (*owners, self._whole):
            generator = getattr(owner, "generator", None)
            if generator is not None and hasattr(generator, "get_state") and all(generator is not g for g in found):
                found.append(generator)
        return found

    def restore_generators(self, states: list[torch.Tensor]) -> None:
        """Let the loader's own generators draw on from ``states``, which were saved with a :meth:`position`."""
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Return an iterator over a whole epoch."""
        self.is_new = False
        if (
            self.order is not None
            and self.order["seed"] is None
            and getattr(self.loader, "_iterator", None) is not None
        ):
            self.order["draws_seed"] = False  # persistent workers have theirs
        samplers.set_epoch(self.loader, epoch)
        strategy = self.run.strategy
        self.epoch_rng = rng.collect(strategy.accelerator, strategy.root_device)
        self.generator_states = [generator.get_state() for generator in self._generators()]
        return start_accelerator_iterator(self.loader, self.iterated)

    def resume(self, epoch: int, skip: int, position: dict[str, Any], then: Callable[[], None]) -> Iterator[Any]:
        """Return an iterator over the epoch of ``position`` from its batch number ``skip``.

        Args:
            epoch: its number.
            skip: batches that have been used.
            position: this rank's :meth:`position` at that point.
            then: restores the random-number generators of that point.
        """
        self.is_new = False
        samplers.set_epoch(self.loader, epoch)
        strategy = self.run.strategy
        loader = self.loader
        skip -= 0 if self.order is None else self.order["batches"]
        self.epoch_rng = position["epoch_rng"]
        if self.epoch_rng is None:  # the rest of an epoch that begins here
            then()
            self.epoch_rng = rng.collect(strategy.accelerator, strategy.root_device)
        self.generator_states = position["generators_at_start"]
        if "loader" in position and is_stateful(loader, self.iterated):
            self.iterated.load_state_dict(position["loader"])
            iterator = start_accelerator_iterator(loader, self.iterated)
            then()
            return iterator
        rng.restore(self.epoch_rng, strategy.accelerator, strategy.root_device)
        self.restore_generators(self.generator_states)

        def arrived() -> None:
            self.restore_generators(position["generators"])
            then()

        indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if indexed and loader.num_workers == 0 and not hasattr(loader, "load_state_dict"):
            rest = samplers.with_skip(loader, skip, arrived)
            self._of_epoch.append((rest, accelerator_loader(rest, self.run)))
            return start_accelerator_iterator(*self._of_epoch[-1])
        iterator = start_accelerator_iterator(loader, self.iterated)
        for _ in range(skip):
            if next(iterator, arrived) is arrived:  # fewer batches than there were
                break
        arrived()
        return iterator

    def position(self) -> dict[str, Any]:
        """Return this rank's part of the position, as plain data."""
        position = {
            "epoch_rng": self.epoch_rng,
            "generators_at_start": self.generator_states,
            "generators": [generator.get_state() for generator in self._generators()],
            "order": self.order,
            "samples": self.samples,
            "length": self.whole_loader_length,
        }
        if is_stateful(self.loader, self.iterated):
            position["loader"] = self.iterated.state_dict()
        return position
