"""Call functions on rank 0 alone."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_log = logging.getLogger("lightning.pytorch")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


class _RankZeroOnly:
    """Decorates a function so that other ranks than 0 don't call it, and get None or ``default``.

    Attributes:
        rank: of this process in the running job, or what the launcher has set.
    """

    def __init__(self) -> None:
        self._set: int | None = None

    @property
    def rank(self) -> int:
        if self._set is not None:
            return self._set
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)

    @rank.setter
    def rank(self, value: int) -> None:
        self._set = value

    def __call__(self, function: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.rank == 0 else default

        return call


rank_zero_only = _RankZeroOnly()


class LightningDeprecationWarning(DeprecationWarning):
    """Lightning's, for filters."""


@rank_zero_only
def rank_zero_info(message: Any, *args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log on rank 0."""
    _log.info(message, *args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_debug(message: Any, *args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log on rank 0, for debugging."""
    _log.debug(message, *args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_warn(message: Any, stacklevel: int = 4, category: Any = UserWarning, **kwargs: Any) -> None:
    """Warn on rank 0."""
    warnings.warn(message, category, stacklevel=stacklevel, **kwargs)


def rank_zero_deprecation(message: Any, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn of what is deprecated, on rank 0."""
    rank_zero_warn(message, stacklevel=stacklevel, category=LightningDeprecationWarning, **kwargs)
