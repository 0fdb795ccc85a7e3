"""Replace torch's DataLoader by poptorch's, whose batches are of the combined size."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from torchhal.errors import ConfigurationError, ModelError
from torchhal_ipu._config import sizes

_log = logging.getLogger("torchhal")


def combined(loader: Any, options: Any, *, training: bool) -> Any:
    """Return ``loader`` with batches for one call of a model with ``options``.

    torch's DataLoader with a ``batch_size`` is made anew as poptorch's, which takes so many samples for each
    micro-batch. In training its last batch is left out if it is smaller. Anything else must give combined batches
    itself, and is returned as it is.

    Raises:
        ConfigurationError: poptorch's DataLoader, made with other sizes.
        ModelError: a batch sampler of the user's own.
    """
    import poptorch

    need = sizes(options)
    if isinstance(loader, poptorch.DataLoader):
        if (has := sizes(loader.options)) != need:
            raise ConfigurationError(
                f"the poptorch.DataLoader was made with options for {has}, and this run has {need}: pass torch's "
                "DataLoader, or make it with these"
            )
        return loader
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or (loader.batch_size is None and loader.batch_sampler is None):
        return loader
    batch_sampler = loader.batch_sampler
    if type(batch_sampler) is not BatchSampler and not isinstance(loader.dataset, IterableDataset):
        raise ModelError(
            f"{type(batch_sampler).__name__} decides what is in a batch, and a call on IPUs takes {need.parts} of them "
            "at once: give the DataLoader batch_size and sampler, or make a poptorch.DataLoader"
        )
    drop_last = loader.drop_last or training
    if training and not loader.drop_last:
        _say_what_is_left_out(loader, need.parts)
    arguments: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "drop_last": drop_last,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": False,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers:
        arguments["prefetch_factor"] = loader.prefetch_factor
    if not isinstance(loader.dataset, IterableDataset):
        arguments["sampler"] = batch_sampler.sampler
    return poptorch.DataLoader(options.clone(), loader.dataset, **arguments)


def is_combined(loader: Any) -> bool:
    """Return True for poptorch's own loader, all of whose batches but the last are of the combined size."""
    import poptorch

    return isinstance(loader, poptorch.DataLoader)


def _say_what_is_left_out(loader: DataLoader[Any], parts: int) -> None:
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if sampler is None or loader.batch_size is None or not hasattr(sampler, "__len__"):
        return
    whole = loader.batch_size * parts
    if len(sampler) > whole and (rest := len(sampler) % whole):
        _log.warning(
            "the last %d of %d samples of an epoch are not trained on: a compiled step takes %d at once (batch_size=%d "
            "times %d); drop_last=True says so, too",
            rest, len(sampler), whole, loader.batch_size, parts,
        )  # fmt: skip
