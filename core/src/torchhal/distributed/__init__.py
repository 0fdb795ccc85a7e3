"""Rendezvous, stores, collectives, barriers, failure reports and stop requests between the ranks of a job.

The names are imported on first use: a subprocess reads some of them before the user's script has imported torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal.distributed._rank_monitor import RankMonitor, StopSignals

__all__ = ["RankMonitor", "StopSignals"]

__getattr__, __dir__ = lazy_names(__name__, {"RankMonitor": "_rank_monitor", "StopSignals": "_rank_monitor"})
