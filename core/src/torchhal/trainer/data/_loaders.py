"""Find the loaders of a stage, check them, and limit their lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torchhal._overrides import implements
from torchhal.errors import ConfigurationError, ModelError

LOADER_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def loader_length(loader: Any) -> int | None:
    """Return the number of batches in ``loader``, or None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_sized(loader: Any) -> bool:
    """Return whether ``loader`` gives exactly its length's number of batches, unlike one of an IterableDataset."""
    known = loader_length(loader) is not None
    return known and not isinstance(getattr(loader, "dataset", None), IterableDataset)


def is_one_shot(loader: Any) -> bool:
    """Return whether ``loader`` gives its batches only once, as a generator does.

    One that is its own iterator and has a length restarts at each ``iter()``.
    """
    return isinstance(loader, Iterator) and loader_length(loader) is None


def last_batch(loader: Any, length: int | None) -> int | None:
    """Return how many batches of ``loader`` an evaluation that uses ``length`` of them reads; None: until it ends.

    Of an IterableDataset in several workers torch only guesses the length: each worker's last batch may be a short one.
    """
    several_workers = getattr(loader, "num_workers", 0) > 0
    return None if several_workers and not is_sized(loader) and length == loader_length(loader) else length


def limit_length(length: int | None, limit: int | float, name: str, *, part: bool = False) -> int | None:
    """Return how many of ``length`` batches ``limit`` allows; None for "until it ends".

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
    """Round down this share of ``length``, but 0.57 of 100 is 57, though the product is 56.99999999999999."""
    return int(round(length * share, 6))


def as_loaders(value: Any) -> list[Any]:
    """One loader or several: a list whose items are all loaders means several, a list of batches is one."""
    if value is None:
        return []
    if isinstance(value, list | tuple) and value and all(is_loader(item) for item in value):
        return list(value)
    if isinstance(value, list | tuple) and not value:
        return []
    return [value]


def is_loader(value: Any) -> bool:
    """Return whether ``value`` gives batches, rather than being one, or a structure of loaders.

    Args:
        value: an item of what was given for a loader.
    """
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


def check_one_loader(loader: Any, what: str = "train_dataloaders") -> None:
    """Raise unless ``loader`` is one iterable of batches.

    Args:
        loader: the user's.
        what: the argument that it comes from, for messages.
    """
    check_loader(loader, what)
    if isinstance(loader, list | tuple) and loader and all(map(is_loader, loader)):
        hint = "combine them in one" if len(loader) > 1 else "pass that loader itself"
        raise ModelError(
            f"'{what}' must be one iterable of batches (got a {type(loader).__name__} of {len(loader)} loader(s)): "
            f"{hint}"
        )


def no_batch(what: str, loader: Any) -> ModelError:
    """Return the error for a loader that gave no batch."""
    if is_one_shot(loader):
        return ModelError(
            f"{what} gave no batch: a {type(loader).__name__} can be read only once. Pass an object that can be "
            "iterated again, such as a DataLoader or a list"
        )
    return ModelError(f"{what} gave no batch: is the dataset empty, or smaller than one batch under drop_last?")


def find_loaders(run: Any, stage: str, given: Any) -> Any:
    """Return what feeds ``stage``: the argument if there is one, else the data module's loader, else the model's.

    Args:
        run: the state of a Trainer.
        stage: train, validate, test or predict.
        given: the argument of fit, validate, test or predict.
    """
    if given is not None:
        return given
    hook = LOADER_HOOKS[stage]
    for owner in (run.datamodule, run.module):
        if implements(owner, hook):
            return run.adapters.adapt_loaders(run.module, stage, getattr(owner, hook)())
    return None
