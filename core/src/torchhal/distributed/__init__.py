"""Rendezvous, stores, collectives, barriers, failure reports and stop requests between the ranks of a job.

The names are imported on first use: a subprocess reads some of them before the user's script has imported torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal.distributed._rank_monitor import RankWatch, StopSignals

__all__ = ["RankWatch", "StopSignals"]

_HOMES = {"RankWatch": "_rank_monitor", "StopSignals": "_rank_monitor"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
