"""Make the running statistics of batch norms anew, by one pass over the training data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchhal.trainer._call_signatures import adapt_step
from torchhal.trainer.data._batch_transfer import batch_transfer
from torchhal.trainer.data._iterators import close_iterator

if TYPE_CHECKING:
    from torchhal import Trainer


@torch.no_grad()
def update_batch_norms(trainer: Trainer, module: Any) -> None:
    """Run ``training_step`` on each training batch of an epoch, in training mode, so that batch norms average over all.

    Every rank must call, when the epochs of a fit are over. As :func:`torch.optim.swa_utils.update_bn` does, but for
    any kind of batch. Nothing is logged.
    """
    run = trainer._run
    data = run.progress.data
    assert data is not None
    step = adapt_step(run.strategy.step_function("training_step"), module.training_step, several_loaders=False)
    transfer = batch_transfer(run.strategy, run.datamodule, module)
    data.reset_epoch()
    batches = data.epoch(run.current_epoch)
    # As in the epochs: never a batch more than the length, and over ranks as many as all of them have.
    limited = batches if data.length is None else itertools.islice(batches, data.length)
    unknown = data.loader_length is None and run.world_size > 1
    hook, run.current_hook = run.current_hook, "training_step"
    try:
        with _averaging_all(module), _without_logging(trainer):
            for batch_idx, batch in enumerate(_together(trainer, limited) if unknown else limited):
                step(batch if transfer is None else transfer(batch, 0), batch_idx, 0)
    finally:
        close_iterator(batches)
        run.current_hook = hook


def _together(trainer: Trainer, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a loader without a length until it ends on any rank."""
    nothing = object()
    while trainer.strategy.reduce_boolean_decision((batch := next(batches, nothing)) is not nothing):
        yield batch


@contextmanager
def _averaging_all(module: nn.Module) -> Iterator[None]:
    """Let each batch norm begin anew, and average over all batches alike, inside."""
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
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
