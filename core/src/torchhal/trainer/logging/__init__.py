"""Accumulate, reduce and report the values that a run logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal.trainer.logging._log_options import (
        REDUCTIONS,
        batch_size_of,
        changed,
        check_batch_size,
        check_value,
        decide,
        is_metric,
    )

__all__ = ["REDUCTIONS", "batch_size_of", "changed", "check_batch_size", "check_value", "decide", "is_metric"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "_log_options"))
