"""Share the samples of loaders out over the replicas of a model."""

from __future__ import annotations

import copy
import os
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torchhal.distributed._dataloader_signals import compose_worker_init
from torchhal.rng import SEED_VARIABLE
from torchhal.trainer.data import _samplers as samplers
from torchhal.trainer.data._compound import CompoundLoader
from torchhal.trainer.data._context import DataContext


def prepare_loader(loader: Any, run: DataContext, *, training: bool) -> Any:
    """Return ``loader`` for this rank; the user's object is never changed."""
    return run.strategy.process_dataloader(_shared_out(loader, run, training=training), training=training)


def _shared_out(loader: Any, run: DataContext, *, training: bool) -> Any:
    if isinstance(loader, CompoundLoader):
        return loader.with_loaders([_shared_out(each, run, training=training) for each in loader.loaders])
    if not isinstance(loader, DataLoader):
        return loader
    loader = _as_asked(loader, run)
    share = replicas(run)
    if share is not None:
        if not isinstance(loader.dataset, IterableDataset):
            loader = samplers.distribute(loader, training=training, seed=sampler_seed(), **share)
        elif share["num_replicas"] > 1:
            run.warn_once(
                f"the IterableDataset {type(loader.dataset).__name__} is read whole by each of "
                f"{share['num_replicas']} ranks unless it shards itself by rank"
            )
    return _with_worker_init(loader)


def prepare_rest(loader: DataLoader[Any], run: DataContext, order: dict[str, Any], generators: list[Any]) -> Any:
    """Return a training loader for this rank's share of what is left of an epoch that other replicas began.

    ``order`` is that of :class:`.TrainingData`, ``generators`` are those of the user's loader.
    """
    loader = _as_asked(loader, run)
    share = run.strategy.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    if order["seed"] is not None:
        loader = samplers.distribute(loader, training=True, seed=order["seed"], start=order["start"], **share)
    else:
        drawn = samplers.RecordedOrderSampler(loader, draws_seed=order["draws_seed"])
        state = (order["rng"], order["generators"])
        rest = samplers.RemainingSampler(drawn, start=order["start"], state=state, generators=generators, **share)
        loader = samplers.rest_of(loader, rest)
    return run.strategy.process_dataloader(_with_worker_init(loader), training=True)


def _as_asked(loader: DataLoader[Any], run: DataContext) -> DataLoader[Any]:
    return samplers.sequential(loader) if run.overfit_batches and run.state.fn == "fit" else loader


def replicas(run: DataContext) -> dict[str, int] | None:
    """Return ``num_replicas`` and ``rank`` by which loaders are shared out; None where they are not.

    Ranks of one replica need the same order too, independent of their random numbers.
    """
    if run.world_size == 1 or not run.use_distributed_sampler:
        return None
    return run.strategy.distributed_sampler_kwargs


def sampler_seed() -> int:
    return int(os.environ.get(SEED_VARIABLE, "0"))


def _with_worker_init(loader: DataLoader[Any]) -> DataLoader[Any]:
    if loader.num_workers > 0:
        loader = copy.copy(loader)
        loader.__dict__.update(worker_init_fn=compose_worker_init(loader.worker_init_fn), _iterator=None)
    return loader
