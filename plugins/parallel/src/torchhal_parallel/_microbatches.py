"""Check that the batches of a loader divide into the microbatches of a pipeline."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, default_collate

from torchhal.errors import ModelError
from torchhal.trainer.data import limit_length


def check_loader(loader: Any, microbatches: int, trainer: Any) -> None:
    """Raise ModelError for batches of training that ``microbatches`` does not divide, where torch's loader has a size.

    The last batch counts if the ``trainer`` gets as far as that.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is not BatchSampler or loader.collate_fn is not default_collate:
        return  # the size of its batches is unknown
    size = sampler.batch_size
    try:
        whole, left = divmod(len(sampler.sampler), size)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        whole, left = 1, 0
    if whole and size % microbatches:
        raise indivisible("a batch", size, microbatches)
    if left % microbatches and not sampler.drop_last and _reaches(trainer, whole + 1):
        raise indivisible("the last batch of an epoch", left, microbatches)


def _reaches(trainer: Any, batches: int) -> bool:
    """Return whether training uses so many batches of an epoch."""
    if trainer is None:
        return True
    limit = trainer.overfit_batches or trainer.limit_train_batches
    few = trainer.max_steps != -1 and trainer.max_steps * trainer.accumulate_grad_batches < batches
    return not few and limit_length(batches, limit, "limit_train_batches", part=True) == batches


def indivisible(what: str, size: int, parts: int) -> ModelError:
    """Return the error for ``what``, of ``size`` samples, that ``parts`` does not divide."""
    return ModelError(
        f"{what} of {size} samples does not divide into {parts} microbatches: choose a batch size that is a multiple "
        f"of {parts} and drop_last=True in the DataLoader, or another microbatches=..."
    )
