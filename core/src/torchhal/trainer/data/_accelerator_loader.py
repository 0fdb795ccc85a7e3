"""Iterate a loader through what the accelerator puts around it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from torchhal._overrides import overrides
from torchhal.accelerators import Accelerator
from torchhal.distributed._dataloader_signals import WorkerInit, signals_blocked
from torchhal.errors import ConfigurationError
from torchhal.trainer.data._context import DataContext
from torchhal.trainer.data._iterators import AcceleratorIterator, start_iterator
from torchhal.trainer.data._loaders import is_one_shot, loader_length

_log = logging.getLogger("torchhal")


def accelerator_loader(loader: Any, run: DataContext) -> Any:
    """Return what ``Accelerator.process_dataloader`` makes of a loader that the strategy has processed.

    Returns:
        ``loader`` itself where the accelerator does nothing, or where the loader can be read only once.

    Raises:
        ConfigurationError: the accelerator returned something that can't take the loader's place.
    """
    accelerator = run.strategy.accelerator
    if is_one_shot(loader) or not overrides(accelerator, Accelerator, "process_dataloader"):
        return loader
    made = accelerator.process_dataloader(loader, run.strategy.root_device)
    name = f"{type(accelerator).__name__}.process_dataloader"
    if not isinstance(made, Iterable) or isinstance(made, Iterator):
        raise ConfigurationError(f"{name} must return an iterable that can be iterated again (got {made!r})")
    length, given = loader_length(made), loader_length(loader)
    if length is not None and length != given:
        raise ConfigurationError(f"{name} must keep the number of batches, {given} (got one of length {length})")
    return made


def start_accelerator_iterator(loader: Any, made: Any) -> Iterator[Any]:
    """Return an iterator over ``made``, which :func:`accelerator_loader` returned for ``loader``."""
    if made is loader:
        return start_iterator(loader)
    if not isinstance(getattr(loader, "worker_init_fn", None), WorkerInit):
        return AcceleratorIterator(iter(made), ends=isinstance(loader, DataLoader))
    with signals_blocked(loader):
        return AcceleratorIterator(iter(made), ends=True)


def close_accelerator_loader(loader: Any, made: Any) -> None:
    """Call ``close()`` of what the accelerator made of ``loader``, which is used no more; an error in it is logged."""
    close = getattr(made, "close", None)
    if made is loader or close is None:
        return
    try:
        close()
    except Exception:  # the run's own error is raised, and the tear-down goes on
        _log.exception("%s.close failed", type(made).__name__)


def is_stateful(loader: Any, made: Any) -> bool:
    """Return whether positions in ``made`` are kept by its ``state_dict``, in the format of the ``loader`` inside."""
    return all(hasattr(each, name) for each in (loader, made) for name in ("state_dict", "load_state_dict"))
