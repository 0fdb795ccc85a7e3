"""Find the largest batch size that fits into memory: train copies of the model with growing batches."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch.distributed as dist
from torch import nn

from torchhal._overrides import implements
from torchhal.errors import ConfigurationError, DistributedError, RankFailedError
from torchhal.rng import host_generators_restored
from torchhal.trainer._connectors import check_model
from torchhal.trainer._trial import fit_trial, launch_trials, make_trial
from torchhal.trainer._trial_state import RestoreState, check_idle, copy_data, copy_model
from torchhal.trainer.adapters import run_of
from torchhal.trainer.callbacks import Callback
from torchhal.trainer.data._batch_size_source import (
    check_batch_size,
    check_batch_size_source,
    loader_of_size,
    set_batch_size,
)
from torchhal.trainer.data._loaders import loader_length
from torchhal.trainer.data._sharing import replicas
from torchhal.tuning._batch_size_search import bisect, check_arguments, nothing_fits

_log = logging.getLogger("torchhal")

FITS, OUT_OF_MEMORY, FAILED, FOLLOWED = "fits", "out of memory", "failed", "followed"
"""Outcomes of a trial on a rank. FOLLOWED: it ended only because another rank's had ended."""


def find_batch_size(
    trainer: Any,
    model: nn.Module,
    train_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    attribute: str = "batch_size",
    mode: str = "power",
    start: int = 2,
    steps: int = 3,
    max_trials: int = 25,
    max_size: int | None = 8192,
    margin: float = 0.05,
) -> int:
    """Return the largest batch size for which a copy of ``model`` trains without running out of memory.

    Each trial takes ``steps`` optimizer steps with the Trainer's components and settings, on its devices, by its
    strategy; schedulers, callbacks, loggers, checkpoints and validation are left out. ``prepare_data`` is called
    once, before the trials, on the ranks on which a fit calls it; ``setup`` and ``teardown`` in each trial. A size
    fits if it fits on every rank: ranks compare after each trial, and one that ran out of memory leaves none
    waiting. The model, the data, the Trainer and the random-number generators are as before, also where the search
    is interrupted or fails: set the size found yourself. Under several processes that run the script, all of them
    call this and get the same result.

    The batch size is that of a DataLoader: of each replica, where several share the data. Passed as
    ``train_dataloaders`` it is copied with other sizes; made by ``train_dataloader`` of the model or a data module, it
    has to be made with their attribute, or hyperparameter, ``attribute``. Anything else is refused.

    On the CPU the system may end a process before an allocation fails: choose ``max_size`` with care.

    Args:
        trainer: the :class:`torchhal.Trainer` that is to fit; not while it runs.
        model: as of :meth:`.Trainer.fit`.
        train_dataloaders: the same: a DataLoader with ``batch_size``.
        datamodule: the same; shallow copies of it are used.
        attribute: name of the batch size where the model or the data module makes the loader.
        mode: ``"power"``: doubled as long as it fits. ``"binary"``: then the largest one by halving the interval.
        start: the first size; halved where it doesn't fit.
        steps: optimizer steps of a trial; the optimizer's state exists from the second on.
        max_trials: the most trials; the largest size that fitted by then is returned.
        max_size: the largest size to try, None: all samples of a replica in one batch, which is never exceeded.
        margin: share by which ``"binary"`` reduces a size beyond which memory ran out, 0 to below 1.

    Raises:
        ConfigurationError: an argument outside its domain, a batch size that can't be changed, a model that can't be
            copied, a process group of the program's own with several ranks; or no size fits.
        RankFailedError: a trial failed on another rank, for another reason than memory.

    .. versionadded:: 0.2
    """
    what = "find_batch_size"
    check_idle(trainer, what)
    check_model(model)
    if hasattr(train_dataloaders, "train_dataloader"):
        train_dataloaders, datamodule = None, train_dataloaders
    if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
        raise ConfigurationError(
            "a process group exists already, in which ranks could not leave a trial when another one has run out of "
            "memory: destroy it before the search, or make it later; the strategy makes one for each trial"
        )
    check_batch_size_source(model, train_dataloaders, datamodule, attribute)
    check_arguments(mode=mode, margin=margin, start=start, steps=steps, max_trials=max_trials, max_size=max_size)
    trial = make_trial(trainer, max_steps=steps, limit_train_batches=1.0, overfit_batches=0.0)
    options = {"mode": mode, "start": start, "max_trials": max_trials, "max_size": max_size, "margin": margin}
    with host_generators_restored():
        size, failed = launch_trials(trial, _search, model, train_dataloaders, datamodule, attribute, options)
    if not size:
        raise nothing_fits(failed)
    return int(size)


def _search(
    template: Any, model: nn.Module, train_dataloaders: Any, datamodule: Any, attribute: str, options: dict[str, Any]
) -> tuple[int, int]:
    """Search on one rank, together with the others; return the size found, or 0, and the last that didn't fit."""
    model, datamodule = _prepare_data(template, model, datamodule)
    trials = _Trials(template, model, train_dataloaders, datamodule, attribute)
    return bisect(trials.fits, limit=lambda: trials.limit, **options)


def _prepare_data(template: Any, model: nn.Module, datamodule: Any) -> tuple[nn.Module, Any]:
    """Call ``prepare_data`` on the ranks on which a fit calls it, and return copies whose trials don't call it.

    Raises:
        Exception: what it raised on this rank.
        RankFailedError: it raised on another rank.
    """
    if not (implements(datamodule, "prepare_data") or implements(model, "prepare_data")):
        return model, datamodule
    model, datamodule = copy_model(model, "find_batch_size"), copy_data(datamodule)
    owners: list[Any] = [owner for owner in (datamodule, model) if implements(owner, "prepare_data")]
    trial = make_trial(template)
    error: Exception | None = None
    strategy = trial.strategy
    strategy.setup_environment()
    try:
        for owner in owners if strategy.local_rank == 0 else ():
            if hasattr(type(owner), "trainer"):
                owner.trainer = run_of(trial).adapters.trainer_for(owner)
            try:
                owner.prepare_data()
            except Exception as raised:
                error = raised
                break
        failed = strategy.all_gather_object(error is not None) if strategy.world_size > 1 else [False]
    finally:
        strategy.teardown()
    if error is not None:
        raise error
    if True in failed:
        rank = failed.index(True)
        raise RankFailedError(f"prepare_data failed on rank {rank}, see there", rank=rank)
    for owner in owners:
        if hasattr(type(owner), "trainer"):
            owner.trainer = None
        vars(owner)["prepare_data"] = None  # as if it had none
    return model, datamodule


class _Trials:
    """The trials of one rank, whose outcomes the ranks agree on.

    Attributes:
        limit: the largest size that makes a difference, all samples of a replica; None where that is not known.
    """

    def __init__(
        self, template: Any, model: nn.Module, train_dataloaders: Any, datamodule: Any, attribute: str
    ) -> None:
        self._template = template
        self._model, self._loader, self._datamodule = model, train_dataloaders, datamodule
        self._attribute = attribute
        self._error: Exception | None = None
        self.limit: int | None = None

    def fits(self, size: int) -> bool:
        """Try a size, and return whether it fits on every rank.

        Raises:
            Exception: what a trial raised on this rank for another reason than memory.
            RankFailedError: one was raised on another rank.
        """
        data = _DataSize(size, self._attribute, self._datamodule)
        outcome = self._attempt(size, data)
        gc.collect()  # an error's frames were in cycles with what they held
        self._template.strategy.accelerator.empty_cache()
        everybody = self._agree((outcome, data.limit))
        outcomes = [each for each, _ in everybody]
        error, self._error = self._error, None
        if error is not None and (outcome == FAILED or FAILED in outcomes or OUT_OF_MEMORY not in outcomes):
            raise error
        if FAILED in outcomes:
            rank = outcomes.index(FAILED)
            raise RankFailedError(f"a trial of batch size {size} failed on rank {rank}, see there", rank=rank)
        known = [limit for _, limit in everybody if limit is not None]
        self.limit = min(known, default=None)
        fits = OUT_OF_MEMORY not in outcomes
        if self._template.is_global_zero:
            _log.info("batch size %d %s", size, "fits" if fits else "does not fit into memory")
        return fits

    def _attempt(self, size: int, data: _DataSize) -> str:
        """Train on batches of ``size`` samples, and return the outcome on this rank."""
        trial = make_trial(self._template, [RestoreState(), data])
        model, datamodule = copy_model(self._model, "find_batch_size"), copy_data(self._datamodule)
        loader = loader_of_size(self._loader, size)
        if loader is None:
            set_batch_size(model, datamodule, self._attribute, size)
        try:
            with host_generators_restored():
                fit_trial(trial, model, loader, datamodule)
        except Exception as error:
            if trial.accelerator.is_out_of_memory(error):
                return OUT_OF_MEMORY
            self._error = error
            return FOLLOWED if isinstance(error, DistributedError) else FAILED
        return FITS

    def _agree(self, mine: Any) -> list[Any]:
        """Return what every rank has found, in rank order."""
        strategy = make_trial(self._template).strategy
        if strategy.world_size == 1:
            return [mine]
        strategy.setup_environment()  # the trial's communication may have failed
        try:
            return list(strategy.all_gather_object(mine))
        finally:
            strategy.teardown()


class _DataSize(Callback):
    """Checks that the loader has the batch size of the trial, and reads how much data there is."""

    def __init__(self, size: int, attribute: str, datamodule: Any) -> None:
        self.size, self.attribute, self.datamodule = size, attribute, datamodule
        self.limit: int | None = None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        run = run_of(trainer)
        data = run.progress.data
        assert data is not None
        check_batch_size(data.given, self.size, self.attribute, module, self.datamodule)
        drawn = getattr(getattr(data.loader, "batch_sampler", None), "sampler", None)
        self.limit = loader_length(drawn)
        if self.limit is None and data.samples is not None:  # a strategy's own loader
            self.limit = -(-data.samples // (replicas(run) or {"num_replicas": 1})["num_replicas"])
