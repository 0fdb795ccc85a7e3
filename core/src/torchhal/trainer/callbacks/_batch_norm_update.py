"""Make the running statistics of batch norms anew, by one pass over the training data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from torchhal.trainer._call_signatures import adapt_step
from torchhal.trainer.data._batch_transfer import batch_transfer
from torchhal.trainer.data._iterators import close_iterator, until_any_ends
from torchhal.trainer.data._training_data import TrainingData

if TYPE_CHECKING:
    from torchhal import Trainer


@torch.no_grad()
def update_batch_norms(trainer: Trainer, module: Any) -> None:
    """Run ``training_step`` on each training batch of an epoch, so that batch norms average over all.

    Those in evaluation mode, and those without running statistics, stay as they are. Every rank must call, when the
    epochs of a fit are over. As :func:`torch.optim.swa_utils.update_bn` does, but for any kind of batch. Nothing is
    logged.
    """
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    norms = [norm for norm in norms if norm.training and norm.track_running_stats]
    if not norms:
        return
    run = trainer._run
    assert run.progress.data is not None
    data = TrainingData(run.progress.data.given, run)  # of its own: the run's keeps its place
    step = adapt_step(run.strategy.step_function("training_step"), module.training_step, several_loaders=False)
    transfer = batch_transfer(run.strategy, run.datamodule, module)
    batches = data.epoch(run.current_epoch)
    # As in the epochs: never a batch more than the length, and over ranks as many as all of them have.
    limited = batches if data.length is None else itertools.islice(batches, data.length)
    unknown = data.loader_length is None and run.world_size > 1
    hook, run.current_hook = run.current_hook, "training_step"
    try:
        with _averaging_all(norms), _without_logging(trainer):
            for batch_idx, batch in enumerate(until_any_ends(limited, run.strategy) if unknown else limited):
                step(batch if transfer is None else transfer(batch, 0), batch_idx, 0)
    finally:
        close_iterator(batches)
        data.close()
        run.current_hook = hook


@contextmanager
def _averaging_all(norms: list[_BatchNorm]) -> Iterator[None]:
    """Let each batch norm begin anew, and average over all batches alike, inside."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


@contextmanager
def _without_logging(trainer: Trainer) -> Iterator[None]:
    """Drop what ``self.log`` is given inside: the epochs, and their values, are over."""
    results: Any = trainer.results
    results.log = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del results.log
