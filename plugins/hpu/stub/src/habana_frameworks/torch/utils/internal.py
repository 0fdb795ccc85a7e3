"""Which mode the process is in."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

__all__ = ["is_lazy", "lazy_only"]

_log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def _mode() -> bool:
    return os.environ.get("PT_HPU_LAZY_MODE", "1") != "0"


def is_lazy() -> bool:
    """As the environment said when this was first asked."""
    return _mode()


def lazy_only(func: Callable[..., Any]) -> Callable[..., None]:
    """``func``, which does nothing outside lazy mode."""
    lazy = is_lazy()
    if not lazy:
        _log.warning("Calling %s has no effect: it is for lazy mode only. (logged once)", func.__name__)

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> None:
        if lazy:
            func(*args, **kwargs)

    return call
