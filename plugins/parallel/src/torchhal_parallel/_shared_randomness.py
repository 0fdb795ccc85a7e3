"""Give the ranks that share a batch the same random numbers: generators, and the seeds of their data workers."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchhal import rng
from torchhal.distributed import collectives


class SharedRandomness:
    """The random numbers of the ranks of one batch: augmentation and dropout are the same on all of them.

    Made on every rank, as it is exchanged: the first rank of each batch gives its state.

    Args:
        strategy: whose accelerator and device have the generators.
        replica: the share of the data that this rank has; ranks of one batch have the same.
        is_first: this rank is the first of those of its batch.
    """

    def __init__(self, strategy: Any, replica: int, *, is_first: bool) -> None:
        self._strategy = strategy
        own = rng.collect(strategy.accelerator, strategy.root_device) if is_first else None
        with strategy.guard("the exchange of random numbers"):
            everybody = collectives.all_gather_object((replica, own))
        self._state = next(state for other, state in everybody if state is not None and other == replica)
        self._loader_seed = zlib.crc32(bytes(self._state["torch"].tolist()))

    def seed_generators(self) -> None:
        """Set this rank's generators to the state of the first rank of its batch."""
        rng.restore(self._state, self._strategy.accelerator, self._strategy.root_device)

    def seed_workers(self, loader: Any) -> Any:
        """Return ``loader`` with a generator for the seeds of its workers, unless it has one or needs none."""
        with_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        if not with_workers or loader.generator is not None:  # the user has chosen one
            return loader
        loader = copy.copy(loader)
        loader.__dict__.update(generator=torch.Generator().manual_seed(self._loader_seed), _iterator=None)
        self._loader_seed += 1  # for the next loader
        return loader
