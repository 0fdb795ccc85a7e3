"""Loaders: found on the model, the data module or the arguments; shared out over ranks; limited; resumed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from torchhal import rng
from torchhal.distributed._dataloader_signals import WorkerInit, compose_worker_init, signals_blocked
from torchhal.errors import ConfigurationError, ModelError
from torchhal.rng import SEED_VARIABLE
from torchhal.trainer._part import TrainerPart
from torchhal.trainer.data import _samplers as samplers

if TYPE_CHECKING:
    from torchhal.trainer.trainer import Trainer

LOADER_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def loader_length(loader: Any) -> int | None:
    """Batches in ``loader``, or None when it doesn't know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _is_sized(loader: Any) -> bool:
    """Whether ``loader`` gives as many batches as its length says: an IterableDataset gives what it has."""
    known = loader_length(loader) is not None
    return known and not isinstance(getattr(loader, "dataset", None), IterableDataset)


def is_one_shot(loader: Any) -> bool:
    """Whether ``loader`` gives its batches only once, as a generator does; one that is its own iterator and knows its
    length begins again at each ``iter()``."""
    return isinstance(loader, Iterator) and loader_length(loader) is None


def last_batch(loader: Any, length: int | None) -> int | None:
    """How many batches of ``loader`` an evaluation that uses ``length`` of them reads; None: until it ends.

    Of an IterableDataset in several workers torch only guesses the length: each worker's last batch may be a short one.
    """
    several_workers = getattr(loader, "num_workers", 0) > 0
    return None if several_workers and not _is_sized(loader) and length == loader_length(loader) else length


def limit_length(length: int | None, limit: int | float, name: str, *, part: bool = False) -> int | None:
    """How many of ``length`` batches ``limit`` allows; None for "until it ends".

    A share that leaves nothing is an error, or one batch where ``length`` is only a rank's ``part`` of the data.
    """
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if limit in (0.0, 1.0):
        return length if limit else 0
    if length is None:
        raise ConfigurationError(
            f"'{name}' is a share of the batches ({limit}), but the loader doesn't know how many it has: use an int"
        )
    count = share_of(length, limit)
    if length and not count and part:
        return 1
    if length and not count:
        raise ConfigurationError(
            f"'{name}' must leave at least one batch (got {limit} of {length} batches): use {1 / length:.2g} or more, "
            "an int, or 0 to leave all out"
        )
    return count


def share_of(length: int, share: float) -> int:
    """Whole batches in this share of ``length``: 0.57 of 100 is 57, though the product is 56.99999999999999."""
    return int(round(length * share, 6))


def as_loaders(value: Any) -> list[Any]:
    """One loader or several: a list whose items are all loaders means several, a list of batches is one."""
    if value is None:
        return []
    if isinstance(value, list | tuple) and value and all(_is_loader(item) for item in value):
        return list(value)
    if isinstance(value, list | tuple) and not value:
        return []
    return [value]


def _is_loader(value: Any) -> bool:
    # a batch may be a list, a tuple, a mapping, a tensor or a graph; anything else that can be iterated feeds batches
    return isinstance(value, DataLoader) or (
        isinstance(value, Iterable)
        and not isinstance(value, list | tuple | Mapping | str | bytes)
        and not hasattr(value, "shape")
        and not hasattr(value, "to")
    )


def check_loader(loader: Any, what: str) -> None:
    if isinstance(loader, type | str | bytes | Mapping) or not isinstance(loader, Iterable):
        hint = ": combine the loaders in one" if isinstance(loader, Mapping) else ""
        raise ModelError(f"'{what}' must be an iterable of batches, such as a DataLoader (got {loader!r}){hint}")


def check_training_loader(loader: Any) -> None:
    check_loader(loader, "train_dataloaders")
    if isinstance(loader, list | tuple) and loader and all(map(_is_loader, loader)):
        hint = "combine them in one" if len(loader) > 1 else "pass that loader itself"
        raise ModelError(
            f"'train_dataloaders' must be one iterable of batches (got a {type(loader).__name__} of {len(loader)} "
            f"loader(s)): {hint}"
        )


def no_batch(what: str, loader: Any) -> ModelError:
    """The error for a loader that gave nothing."""
    if is_one_shot(loader):
        return ModelError(
            f"{what} gave no batch: a {type(loader).__name__} can be read only once. Pass an object that can be "
            "iterated again, such as a DataLoader or a list"
        )
    return ModelError(f"{what} gave no batch: is the dataset empty, or smaller than one batch under drop_last?")


def find_loaders(stage: str, given: Any, module: Any, datamodule: Any) -> Any:
    """What feeds ``stage``: the argument if there is one, else the data module's loader, else the model's."""
    if given is not None:
        return given
    hook = LOADER_HOOKS[stage]
    for owner in (datamodule, module):
        function = getattr(owner, hook, None)
        if callable(function):
            return function()
    return None


def prepare_loader(loader: Any, trainer: Trainer, *, training: bool) -> Any:
    """``loader`` for this rank: the user's object is never changed."""
    if not isinstance(loader, DataLoader):
        return trainer.strategy.process_dataloader(loader, training=training)
    loader = _as_asked(loader, trainer)
    share = _share(trainer)
    if share is not None:
        if not isinstance(loader.dataset, IterableDataset):
            loader = samplers.distribute(loader, training=training, seed=_seed(), **share)
        elif share["num_replicas"] > 1:
            trainer.warn_once(
                f"the IterableDataset {type(loader.dataset).__name__} is read whole by each of "
                f"{share['num_replicas']} ranks unless it shards itself by rank"
            )
    return _finish_loader(loader, trainer, training=training)


def prepare_rest(loader: DataLoader[Any], trainer: Trainer, order: dict[str, Any], generators: list[Any]) -> Any:
    """A training ``loader`` for this rank's share of what is left of an epoch that another number of replicas began.

    ``order`` is that of :class:`TrainingData`, ``generators`` are those of the user's loader.
    """
    loader = _as_asked(loader, trainer)
    share = trainer.strategy.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    if order["seed"] is not None:
        loader = samplers.distribute(loader, training=True, seed=order["seed"], start=order["start"], **share)
    else:
        drawn = samplers.RecordedOrderSampler(loader, draws_seed=order["draws_seed"])
        state = (order["rng"], order["generators"])
        rest = samplers.RemainingSampler(drawn, start=order["start"], state=state, generators=generators, **share)
        loader = samplers.rest_of(loader, rest)
    return _finish_loader(loader, trainer, training=True)


def _as_asked(loader: DataLoader[Any], trainer: Trainer) -> DataLoader[Any]:
    return samplers.sequential(loader) if trainer.overfit_batches and trainer.state.fn == "fit" else loader


def _share(trainer: Trainer) -> dict[str, int] | None:
    """What the Trainer shares loaders out by; None where it doesn't. Ranks of one replica need one order too, whatever
    random numbers each has drawn."""
    if trainer.world_size == 1 or not trainer.use_distributed_sampler:
        return None
    return trainer.strategy.distributed_sampler_kwargs


def _seed() -> int:
    return int(os.environ.get(SEED_VARIABLE, "0"))


def _finish_loader(loader: DataLoader[Any], trainer: Trainer, *, training: bool) -> Any:
    if loader.num_workers > 0:
        loader = copy.copy(loader)
        loader.__dict__.update(worker_init_fn=compose_worker_init(loader.worker_init_fn), _iterator=None)
    return trainer.strategy.process_dataloader(loader, training=training)


@dataclass
class EvaluationData:
    """The loaders of one evaluation and how many batches of each are used."""

    loaders: list[Any] = field(default_factory=list)
    lengths: list[int | None] = field(default_factory=list)
    """This rank's; None where only the loader's end will tell."""
    common: list[int] = field(default_factory=list)
    """Batches that every rank has: where all of them stand at the same place."""
    batches: list[list[int] | None] = field(default_factory=list)
    """How many each rank has; None where not all of them can know, nothing where none is used."""
    anywhere: bool = False
    """Whether any rank has a batch: the same on every rank, as whoever evaluates must meet the others."""

    @classmethod
    def build(
        cls, given: Any, trainer: Trainer, limit: int | float, limit_name: str, what: str, *, as_trained: bool = False
    ) -> EvaluationData:
        """``as_trained``: each rank has the share of the batches that it trains on."""
        loaders = as_loaders(given)
        for loader in loaders:
            check_loader(loader, what)
            if loader_length(loader) == 0 and limit:
                raise no_batch(f"a loader of {what!r}" if len(loaders) > 1 else f"the loader of {what!r}", loader)
            limit_length(loader_length(loader), limit, limit_name)  # of the whole, so that all ranks raise or none
        prepared = [prepare_loader(loader, trainer, training=as_trained) for loader in loaders]
        lengths = [limit_length(loader_length(loader), limit, limit_name, part=True) for loader in prepared]
        exact = [length if _is_sized(loader) else None for length, loader in zip(lengths, prepared, strict=True)]
        told = trainer.strategy.all_gather_object((lengths, exact))
        everybody = [theirs for theirs, _ in told]
        if len({len(theirs) for theirs in everybody}) > 1:
            listing = ", ".join(f"rank {rank}: {len(theirs)}" for rank, theirs in enumerate(everybody))
            raise ModelError(f"every rank must evaluate on the same number of loaders ({listing})")
        common = [min(length or 0 for length in column) for column in zip(*everybody, strict=True)]
        batches = [
            None if None in column else list(column) for column in zip(*(theirs for _, theirs in told), strict=True)
        ]
        return cls(prepared, lengths, common, batches, any(length != 0 for theirs in everybody for length in theirs))

    def first(self, batches: int) -> EvaluationData:
        """The same with at most so many batches of each loader; -1 for all."""
        lengths, common, counts = list(self.lengths), list(self.common), list(self.batches)
        if batches != -1:
            lengths = [batches if length is None else min(batches, length) for length in lengths]
            common = [min(batches, each) for each in common]
            counts = [each and [min(batches, count) for count in each] for each in counts]
        return EvaluationData(self.loaders, lengths, common, counts, self.anywhere)

    def skip(self, index: int) -> None:
        """Use no batch of a loader."""
        self.lengths[index] = self.common[index] = 0
        self.batches[index] = []

    def __bool__(self) -> bool:
        return self.anywhere


def load_validation_data(trainer: Trainer) -> EvaluationData:
    """What a fit validates on; nothing where the model has no ``validation_step`` or no batch is wanted.

    Under ``overfit_batches`` each validation loader gives its place to the training loader.
    """
    module, given = trainer.module, trainer.attachments.validate
    if not callable(getattr(module, "validation_step", None)):
        if given is not None:
            trainer.warn_once(f"{type(module).__name__} has no validation_step, so val_dataloaders is not used")
        return EvaluationData()
    if not (trainer.overfit_batches or trainer.limit_val_batches):
        return EvaluationData()
    found = find_loaders("validate", given, module, trainer.datamodule)
    if not trainer.overfit_batches:
        return EvaluationData.build(found, trainer, trainer.limit_val_batches, "limit_val_batches", "val_dataloaders")
    trained_on = trainer.reload_train_loader(first=True).given
    if isinstance(trained_on, Iterator) and as_loaders(found):
        raise ModelError(
            "'overfit_batches' validates on the training batches, in the midst of an epoch too, but a "
            f"{type(trained_on).__name__} can't be read a second time meanwhile: pass a DataLoader or a list, or no "
            "validation data"
        )
    same = [trained_on for _ in as_loaders(found)]
    limit = trainer.overfit_batches
    return EvaluationData.build(same, trainer, limit, "overfit_batches", "train_dataloaders", as_trained=True)


class TrainingData(TrainerPart):
    """The training loader, one iterator per epoch, and the position in it.

    The position is exact: it holds the generators' states from before the epoch's iterator was made, the number
    of batches used, and (in the checkpoint's ``rng``) the states at that point. Continuing makes the same
    iterator and goes to the next batch: without workers by skipping indices, with workers (whose own generators
    have advanced with every sample) by reading the batches again, and for a loader with ``state_dict`` and
    ``load_state_dict`` by asking it.

    A run may go on with another number of replicas in the midst of an epoch. ``order`` tells how the epoch's items
    were drawn, those of all replicas, so that the ones that are left can be shared out anew. Items are samples, or
    batches where the user's own batch sampler, or no sampler at all, makes these.
    """

    def __init__(self, loader: Any, trainer: Trainer) -> None:
        check_training_loader(loader)
        super().__init__(trainer)
        self.given = loader
        self.loader = self._whole = prepare_loader(loader, trainer, training=True)
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
        strategy = self.trainer.strategy
        if strategy.world_size == 1:
            return
        lengths = strategy.all_gather_object(self.length)
        if len(set(lengths)) > 1:
            listing = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
            counts = [length for length in lengths if length is not None]
            hint = f"limit_train_batches={min(counts)}" if len(counts) == len(lengths) else "the same kind of loader"
            raise ModelError(
                f"every rank must train on the same number of batches ({listing}): use {hint}, or let the Trainer "
                "share one dataset out (use_distributed_sampler=True)"
            )

    def _limit(self) -> tuple[int | float, str]:
        trainer = self.trainer
        if trainer.overfit_batches:
            return trainer.overfit_batches, "overfit_batches"
        return trainer.limit_train_batches, "limit_train_batches"

    def _own_order(self) -> dict[str, Any] | None:
        """How a whole epoch is drawn: with ``seed``, or (None) from the loader's own generators. None: who knows."""
        given = self.given
        if (
            not isinstance(given, DataLoader)
            or type(self.loader) is not type(given)  # a strategy's own, of whose batches it alone knows what they hold
            or isinstance(given.dataset, IterableDataset)
            or samplers.is_shared_by_user(given)
            or not self.trainer.use_distributed_sampler
        ):
            return None
        if _share(self.trainer) is not None:
            seed: int | None = _seed()
        elif (
            self.trainer.world_size == 1
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
        """Let the running epoch go on in the order that it had in the run that saved ``entry``, a :meth:`position`."""
        order = entry.get("order")
        if order is None or self.order is None:
            return
        # the loader by itself would draw another one where a rest is left, or its workers had their seed already
        if order["start"] or order != self.order:
            self.resume_remaining(self.remaining_after(entry, order["start"]))

    def resume_remaining(self, order: dict[str, Any]) -> None:
        """Let the running epoch have the items of ``order`` from number ``order["start"]`` on, which is where this
        number of replicas took over, at batch ``order["batches"]``."""
        self.order = order
        self.loader = prepare_rest(self.given, self.trainer, order, self._generators())
        rest = loader_length(self.loader)
        self.loader_length = None if rest is None else order["batches"] + rest
        self.length = limit_length(self.loader_length, *self._limit())

    def reset_epoch(self) -> None:
        """Let the next epoch have all items again."""
        if self.loader is not self._whole:
            close_loader(self.loader)
        self.loader, self.order = self._whole, self._whole_order
        self.length, self.loader_length = self.whole_length, self.whole_loader_length

    def remaining_after(self, entry: dict[str, Any], used: int) -> dict[str, Any]:
        """The order of an epoch after its first ``used`` items, from a rank's :meth:`position` in the run before."""
        order = {**entry["order"], "start": used, "per_batch": self.items_per_batch}
        if order["seed"] is None and "rng" not in order:
            host = {name: state for name, state in entry["epoch_rng"].items() if not name.startswith("device")}
            order.update(rng=host, generators=entry["generators_at_start"])
        return order

    @property
    def samples(self) -> int | None:
        """Of an epoch over all ranks; None where the dataset doesn't say."""
        dataset = getattr(self.given, "dataset", None)
        return None if isinstance(dataset, IterableDataset) else loader_length(dataset)

    def _generators(self) -> list[Any]:
        """The loader's own generators, each once, and the one that a strategy may have given it."""
        found: list[Any] = []
        given, batches = self.given, getattr(self.given, "batch_sampler", None)
        owners = (given, getattr(given, "sampler", None), batches, getattr(batches, "sampler", None), self._whole)
        for owner in owners:
            generator = getattr(owner, "generator", None)
            if generator is not None and hasattr(generator, "get_state") and all(generator is not g for g in found):
                found.append(generator)
        return found

    def restore_generators(self, states: list[torch.Tensor]) -> None:
        """Let the loader's own generators draw on from ``states``, which were saved with a :meth:`position`."""
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    def epoch(self, epoch: int) -> Iterator[Any]:
        """A fresh epoch from its first batch."""
        self.is_new = False
        if (
            self.order is not None
            and self.order["seed"] is None
            and getattr(self.loader, "_iterator", None) is not None
        ):
            self.order["draws_seed"] = False  # persistent workers have theirs
        samplers.set_epoch(self.loader, epoch)
        strategy = self.trainer.strategy
        self.epoch_rng = rng.collect(strategy.accelerator, strategy.root_device)
        self.generator_states = [generator.get_state() for generator in self._generators()]
        iterator = start_iterator(self.loader)
        return iterator

    def resume(self, epoch: int, skip: int, position: dict[str, Any], then: Callable[[], None]) -> Iterator[Any]:
        """The epoch of ``position`` from its batch number ``skip``; ``then`` restores the generators of that point."""
        self.is_new = False
        samplers.set_epoch(self.loader, epoch)
        strategy = self.trainer.strategy
        loader = self.loader
        skip -= 0 if self.order is None else self.order["batches"]
        self.epoch_rng = position["epoch_rng"]
        if self.epoch_rng is None:  # a rest that begins here
            then()
            self.epoch_rng = rng.collect(strategy.accelerator, strategy.root_device)
        self.generator_states = position["generators_at_start"]
        if "loader" in position and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(position["loader"])
            iterator = start_iterator(loader)
            then()
            return iterator
        rng.restore(self.epoch_rng, strategy.accelerator, strategy.root_device)
        self.restore_generators(self.generator_states)

        def arrived() -> None:
            self.restore_generators(position["generators"])
            then()

        indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if indexed and loader.num_workers == 0:
            return iter(samplers.with_skip(loader, skip, arrived))
        iterator = start_iterator(loader)
        for _ in range(skip):
            if next(iterator, arrived) is arrived:  # fewer batches than there were
                break
        arrived()
        return iterator

    def position(self) -> dict[str, Any]:
        """This rank's part of the position, as plain data."""
        position = {
            "epoch_rng": self.epoch_rng,
            "generators_at_start": self.generator_states,
            "generators": [generator.get_state() for generator in self._generators()],
            "order": self.order,
            "samples": self.samples,
            "length": self.whole_loader_length,
        }
        if hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict"):
            position["loader"] = self.loader.state_dict()
        return position


def start_iterator(loader: Any) -> Iterator[Any]:
    """``iter(loader)``, with workers that no signal to the whole group can end before they know what to make of it."""
    iterator: Iterator[Any]
    if isinstance(getattr(loader, "worker_init_fn", None), WorkerInit):
        with signals_blocked(loader):
            iterator = iter(loader)
    else:
        iterator = iter(loader)
    return iterator


def exhaust_sampler(iterator: Any) -> None:
    """Reach the end of the sampler of a DataLoader's iterator whose batches are used up, as a for loop does.

    A sampler with a generator of its own draws once more there. The iterator itself isn't asked: a loader need not
    give, or survive being asked for, more batches than its length.
    """
    next(getattr(iterator, "_sampler_iter", iter(())), None)


def close_loader(loader: Any) -> None:
    """End the persistent workers of a loader that was prepared for one run."""
    iterator = getattr(loader, "_iterator", None)
    if isinstance(getattr(loader, "worker_init_fn", None), WorkerInit) and iterator is not None:
        iterator._shutdown_workers()
        loader.__dict__["_iterator"] = None


def close_iterator(iterator: Any) -> None:
    """End the workers of an iterator that may not have reached its end.

    Left to the garbage collector they end whenever it finds them, in the midst of another run or in a forked child.
    """
    if getattr(iterator, "_persistent_workers", False):
        return
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


def batch_transfer(trainer: Trainer, module: Any) -> Callable[[Any, int], Any] | None:
    """What brings a batch to the device, the user's hooks included; None where a batch can be used as it is."""
    from torchhal._overrides import overrides
    from torchhal.accelerators import Accelerator
    from torchhal.module import ModuleHooks
    from torchhal.strategies import Strategy

    def hook(name: str) -> Callable[..., Any] | None:
        for owner in (trainer.datamodule, module):
            if owner is not None and hasattr(owner, name) and overrides(owner, ModuleHooks, name):
                function: Callable[..., Any] = getattr(owner, name)
                return function
        return None

    strategy = trainer.strategy
    before, move, after = (
        hook(name) for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    )
    identity = (
        strategy.root_device.type == "cpu"
        and not overrides(strategy, Strategy, "batch_to_device")
        and not overrides(strategy.accelerator, Accelerator, "batch_to_device")
    )
    if before is None and move is None and after is None:
        if identity:
            return None
        to_device = strategy.batch_to_device
        return lambda batch, dataloader_idx: to_device(batch)
    device = strategy.root_device

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        if move is not None:
            batch = move(batch, device, dataloader_idx)
        elif not identity:
            batch = strategy.batch_to_device(batch)
        return batch if after is None else after(batch, dataloader_idx)

    return transfer
