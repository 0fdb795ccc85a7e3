"""Change the batch size of training data: of a DataLoader, or of the module or data module that makes one."""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from torchhal._overrides import implements
from torchhal.errors import ConfigurationError
from torchhal.trainer._fields import find_field, set_field
from torchhal.trainer.data._samplers import with_batch_size

DEFAULT_ATTRIBUTE: Final = "batch_size"


def check_batch_size_source(model: nn.Module, train_dataloaders: Any, datamodule: Any, attribute: str) -> None:
    """Raise ConfigurationError where the batch size of the training data can't be changed.

    Args:
        model: as of fit.
        train_dataloaders: the same.
        datamodule: the same.
        attribute: name of the batch size where the model or the data module makes the loader.
    """
    if train_dataloaders is not None:
        if attribute != DEFAULT_ATTRIBUTE:
            raise ConfigurationError(
                "'attribute' names the batch size of a model or a data module that makes its loader (got "
                f"{attribute!r}): leave it out, or 'train_dataloaders'"
            )
        if reason := _fixed(train_dataloaders):
            raise ConfigurationError(
                f"the batch size of what was passed can't be changed: {reason}. Pass a DataLoader made with "
                "batch_size=..., or let train_dataloader() of the model or a data module make it"
            )
        return
    if find_field((datamodule, model), attribute) is None:
        owners = [type(owner).__name__ for owner in (datamodule, model) if owner is not None]
        raise ConfigurationError(
            f"{' and '.join(owners)} {'have' if len(owners) > 1 else 'has'} no attribute or hyperparameter "
            f"{attribute!r}: give train_dataloader() its batch size by one, and its name by attribute=..."
        )


def _fixed(loader: Any) -> str:
    """Return why the batch size of ``loader`` is fixed; empty if it isn't."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is no DataLoader"
    if loader.batch_sampler is None:
        return "its DataLoader has batch_size=None, so the dataset makes the batches"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"its DataLoader has a batch sampler of its own, {type(loader.batch_sampler).__name__}"
    return ""


def loader_of_size(train_dataloaders: Any, size: int) -> Any:
    """Return a copy of the DataLoader with batches of ``size`` samples; None for None."""
    return None if train_dataloaders is None else with_batch_size(train_dataloaders, size)


def set_batch_size(model: nn.Module, datamodule: Any, attribute: str, size: int) -> None:
    """Let the model or the data module make its loaders with batches of ``size`` samples."""
    set_field((datamodule, model), attribute, size)


def check_batch_size(loader: Any, size: int, attribute: str, model: nn.Module, datamodule: Any) -> None:
    """Raise ConfigurationError where the loader that was made has other batches than it was to have."""
    made = getattr(loader, "batch_size", None)
    if made is None:
        made = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(made, int) and made != size:
        owner = datamodule if implements(datamodule, "train_dataloader") else model
        raise ConfigurationError(
            f"{type(owner).__name__}.train_dataloader() has made batches of {made}, while {attribute!r} was {size}: "
            f"make the loader with it, DataLoader(..., batch_size=self.{attribute}), in each call"
        )
