"""Refuse fairscale's FullyShardedDataParallel by name, and say what does the same."""

from __future__ import annotations

from typing import Any

from torchhal.errors import ConfigurationError
from torchhal.plugin import Availability
from torchhal.strategies import ParallelStrategy
from torchhal_fairscale._sdk import FULLY_SHARDED


class FairscaleFSDPStrategy(ParallelStrategy):
    """Strategy with ``fairscale.nn.FullyShardedDataParallel``, which can't be used; it has no alias.

    Raises:
        ConfigurationError: always, with the reason, and ``fsdp`` and ``zero3`` as what to use instead.
    """

    @classmethod
    def availability(cls) -> Availability:
        return Availability(False, FULLY_SHARDED)

    def __init__(self, **options: Any) -> None:
        raise ConfigurationError(FULLY_SHARDED)
